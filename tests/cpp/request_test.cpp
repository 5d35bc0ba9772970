// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/request.h"

#include "paged_kv/request_table.h"

#include <numeric>

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

std::unique_ptr<Request> make_request(std::string id, int num_tokens) {
  RequestOptions options;
  options.request_id = std::move(id);
  options.prompt_token_ids.resize(static_cast<std::size_t>(num_tokens));
  std::iota(options.prompt_token_ids.begin(), options.prompt_token_ids.end(), 0);
  return std::make_unique<Request>(std::move(options),
                                   make_request_block_hasher(4, make_none_hash()));
}

TEST(Request, HashesBlocksAsTheyFill) {
  const auto request = make_request("r", 7);
  EXPECT_EQ(request->block_hashes().size(), 1U);
  request->append_output_token_ids(std::vector<std::int32_t>{7, 8});
  const auto whole = make_request("w", 9);
  ASSERT_EQ(request->block_hashes().size(), 2U);
  EXPECT_EQ(request->block_hashes()[1], whole->block_hashes()[1]);
  EXPECT_EQ(request->num_prompt_tokens(), 7);
  EXPECT_EQ(request->num_output_tokens(), 2);
}

TEST(Request, AHasherThatThrowsLeavesTheTokens) {
  const auto request = make_request("r", 4);
  request->set_block_hasher([](const Request& r) -> std::vector<BlockHash> {
    if (r.num_tokens() > 4) throw std::runtime_error("no");
    return {};
  });
  EXPECT_THROW(request->append_output_token_ids(std::vector<std::int32_t>{1}), std::runtime_error);
  EXPECT_EQ(request->num_tokens(), 4);
}

TEST(Request, RefusesMediaOutOfRange) {
  RequestOptions options;
  options.keys.mm_features.push_back({"picture", -1, 3});
  EXPECT_THROW(Request(std::move(options)), std::invalid_argument);
}

TEST(RequestTable, GivesRowsAndTakesThemBack) {
  RequestTable table;
  const auto a = make_request("a", 1);
  const auto b = make_request("b", 1);
  EXPECT_FALSE(table.find(*a).valid());
  const RequestIdx row_a = table.find_or_add(*a);
  const RequestIdx row_b = table.find_or_add(*b);
  EXPECT_NE(row_a, row_b);
  EXPECT_EQ(table.find_or_add(*a), row_a);
  EXPECT_EQ(table.find("b"), row_b);
  table.check_integrity();

  table.remove(row_a);
  EXPECT_FALSE(table.find(*a).valid());
  EXPECT_FALSE(table.find("a").valid());
  table.check_integrity();

  // The row is used again; what the old request remembers no longer fits.
  const auto c = make_request("c", 1);
  EXPECT_EQ(table.find_or_add(*c), row_a);
  EXPECT_FALSE(table.find(*a).valid());
  EXPECT_EQ(table.size(), 2U);
  EXPECT_EQ(table.num_rows(), 2U);
  table.check_integrity();
}

TEST(RequestTable, RequestsOfOneIdShareARow) {
  RequestTable table;
  const auto a = make_request("same", 1);
  const auto b = make_request("same", 2);
  EXPECT_EQ(table.find_or_add(*a), table.find_or_add(*b));
}

TEST(RequestTable, ARequestInTwoTablesIsFoundInBoth) {
  RequestTable one;
  RequestTable other;
  const auto filler = make_request("filler", 1);
  const auto request = make_request("r", 1);
  static_cast<void>(other.find_or_add(*filler));
  const RequestIdx in_one = one.find_or_add(*request);
  EXPECT_FALSE(other.find(*request).valid());
  const RequestIdx in_other = other.find_or_add(*request);
  EXPECT_EQ(one.find(*request), in_one);
  EXPECT_EQ(other.find(*request), in_other);
  EXPECT_NE(in_one, in_other);
}

}  // namespace
}  // namespace paged_kv
