# Tests that are not GoogleTest binaries: the ABI from C, its symbols, the rules of the house, compilers.
find_package(Python3 REQUIRED COMPONENTS Interpreter)

add_executable(header_c ${CMAKE_CURRENT_SOURCE_DIR}/header.c)
set_target_properties(header_c PROPERTIES C_STANDARD 99 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF)
target_compile_options(header_c PRIVATE -pedantic -Wall -Wextra -Werror)
target_link_libraries(header_c PRIVATE scruple m)
add_test(NAME header_c COMMAND header_c)

add_test(NAME include_rule COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/scripts/check_includes.py)
add_test(NAME formatted COMMAND ${PROJECT_SOURCE_DIR}/scripts/check_format.sh)
set_tests_properties(formatted PROPERTIES SKIP_RETURN_CODE 77)
add_test(NAME headers_alone COMMAND ${PROJECT_SOURCE_DIR}/scripts/check_headers.sh ${CMAKE_CXX_COMPILER}
                                    ${CMAKE_C_COMPILER})

# A sanitizer adds symbols of its own, and the four builds below are none of its business.
if(NOT CMAKE_CXX_FLAGS MATCHES "fsanitize")
  add_test(NAME exported_symbols COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/check_symbols.sh $<TARGET_FILE:scruple>)
  # Four builds of the library: minutes, and both cores.
  add_test(NAME compilers
           COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/compilers/compare.sh ${CMAKE_CURRENT_BINARY_DIR}/compilers)
  set_tests_properties(compilers PROPERTIES TIMEOUT 900 RUN_SERIAL ON)
endif()
