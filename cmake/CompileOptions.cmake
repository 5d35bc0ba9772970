# SPDX-License-Identifier: Apache-2.0
# paged_kv_compile_options(target): warnings as errors, sanitizers, no source paths in the binary.
# With sanitizers, debug information is what their reports show: lines.
# paged_kv_unity(target): with PAGED_KV_UNITY, ten of its files are compiled as one. For targets whose
# files spend most of their time on the same templates: a binding file of 17 lines instantiates five
# seconds of pybind11. Names in unnamed namespaces have to be unique in such a target.
# paged_kv_test_code(target): for speed is compiled what is tested, not what tests it.

function(paged_kv_compile_options target)
  target_compile_options(
    ${target} PRIVATE -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror
                      -fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=)
  if(PAGED_KV_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${PAGED_KV_SANITIZE}
                                             -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
    target_link_options(${target} PUBLIC -fsanitize=${PAGED_KV_SANITIZE})
  endif()
endfunction()

function(paged_kv_unity target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${PAGED_KV_UNITY} UNITY_BUILD_BATCH_SIZE 10)
endfunction()

function(paged_kv_test_code target)
  target_compile_options(${target} PRIVATE $<$<NOT:$<CONFIG:Debug>>:-O1>)
endfunction()
