# SPDX-License-Identifier: Apache-2.0
# paged_kv_compile_options(target): warnings as errors, sanitizers, no source paths in the binary.
# With sanitizers, debug information is what their reports show: lines.

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
