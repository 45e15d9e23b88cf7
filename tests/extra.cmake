# Tests that are not GoogleTest binaries: the ABI from C, its symbols, the rules of the house, compilers.
find_package(Python3 REQUIRED COMPONENTS Interpreter)

# torch and transformers live in an environment of their own, which `make test` sets up. `make test-gpu` installs
# nothing: there it is the system's Python, found anew each time, and tests skip what it does not have.
find_program(SCRUPLE_PYTHON python HINTS ${PROJECT_SOURCE_DIR}/.venv/bin NO_DEFAULT_PATH)
if(NOT SCRUPLE_PYTHON)
  find_program(system_python python3 NO_CACHE REQUIRED)
  set(SCRUPLE_PYTHON ${system_python})
endif()

foreach(name header checkpoint)
  add_executable(${name}_c ${CMAKE_CURRENT_SOURCE_DIR}/${name}.c)
  set_target_properties(${name}_c PROPERTIES C_STANDARD 99 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF)
  target_compile_options(${name}_c PRIVATE -pedantic -Wall -Wextra -Werror)
  target_link_libraries(${name}_c PRIVATE scruple m)
endforeach()
add_test(NAME header_c COMMAND header_c)
add_test(NAME checkpoint_c COMMAND checkpoint_c ${CMAKE_CURRENT_BINARY_DIR}/checkpoint_c)

add_test(NAME include_rule COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/scripts/check_includes.py)
add_test(NAME pictures COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/bench/pictures.py --check)
add_test(NAME formatted COMMAND ${PROJECT_SOURCE_DIR}/scripts/check_format.sh)
set_tests_properties(formatted PROPERTIES SKIP_RETURN_CODE 77)
add_test(NAME headers_alone COMMAND ${PROJECT_SOURCE_DIR}/scripts/check_headers.sh ${CMAKE_CXX_COMPILER}
                                    ${CMAKE_C_COMPILER})

# A sanitizer adds symbols of its own, the builds below are none of its business, and a Python without it cannot
# load its library.
if(NOT CMAKE_CXX_FLAGS MATCHES "fsanitize")
  add_test(NAME exported_symbols COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/check_symbols.sh $<TARGET_FILE:scruple>)
  # The library of this build, and two more of it; with SCRUPLE_TEST_WHOLE=1 four.
  add_test(NAME compilers COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/compilers/compare.sh
                                  ${CMAKE_CURRENT_BINARY_DIR}/compilers $<TARGET_FILE:scruple>)
  set_tests_properties(compilers PROPERTIES TIMEOUT 900 PROCESSORS 2)
  add_test(NAME wheel COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/wheel_test.sh ${SCRUPLE_PYTHON}
                              ${CMAKE_CURRENT_BINARY_DIR}/wheel)
  set_tests_properties(wheel PROPERTIES TIMEOUT 900 SKIP_RETURN_CODE 77 PROCESSORS 2
                                        ENVIRONMENT "CC=${CMAKE_C_COMPILER};CXX=${CMAKE_CXX_COMPILER}")
  add_subdirectory(torch)
endif()

# A minute of compiling on two cores and a short run of each target; a long one is `fuzz/run.sh FOLDER 600`.
if(NOT CMAKE_CXX_FLAGS MATCHES "fsanitize")
  add_test(NAME fuzz COMMAND ${PROJECT_SOURCE_DIR}/fuzz/run.sh ${CMAKE_CURRENT_BINARY_DIR}/fuzz 10 checkpoint
                             $<$<BOOL:${nlohmann_json_FOUND}>:config> $<$<BOOL:${SCRUPLE_TRAIN}>:jsonl> $<$<BOOL:${SCRUPLE_TRAIN}>:chat> $<$<BOOL:${SCRUPLE_TRAIN}>:tokenizer>
           COMMAND_EXPAND_LISTS)
  set_tests_properties(fuzz PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 900 PROCESSORS 2)
endif()

find_program(SCRUPLE_CHROMIUM NAMES chromium chromium-browser google-chrome)
if(NOT CMAKE_CXX_FLAGS MATCHES "fsanitize")
  add_test(NAME docs_test COMMAND ${SCRUPLE_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/docs_test.py
                                  "${SCRUPLE_CHROMIUM}" ${CMAKE_CURRENT_BINARY_DIR}/docs)
  set_tests_properties(docs_test PROPERTIES TIMEOUT 600)
endif()

# The trainer from outside: its commands, its reports in a browser, its weights in transformers.
if(SCRUPLE_TRAIN AND SCRUPLE_CLI)
  set(reports ${CMAKE_CURRENT_BINARY_DIR}/reports)
  set_tests_properties(report_test PROPERTIES ENVIRONMENT SCRUPLE_REPORT_DIR=${reports} FIXTURES_SETUP reports)
  add_test(NAME compare_report COMMAND scruple_cli compare --steps 20 --batch 4 --context 32 --out ${reports}/compare)
  # A run's own page. Any file is text.
  add_test(NAME train_report
           COMMAND scruple_cli train --data ${PROJECT_SOURCE_DIR}/README.md --out ${reports}/train --force --steps 40
                   --layers 1 --width 32 --heads 2 --context 32 --batch 4 --loss-scale dynamic)
  set_tests_properties(compare_report train_report PROPERTIES FIXTURES_SETUP reports)
  add_test(NAME script_names COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/scripts/check_script.py
                                     report.js report.css report.html
           WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}/train/run/page)
  add_test(NAME report_in_browser
           COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/browser_test.py ${SCRUPLE_CHROMIUM}
                   ${reports}/normal.html ${reports}/hostile.html ${reports}/diverged.html ${reports}/sparse.html
                   ${reports}/small.html ${reports}/lengthy.html ${reports}/compare/report.html
                   ${reports}/train/report.html)
  set_tests_properties(report_in_browser PROPERTIES FIXTURES_REQUIRED reports SKIP_RETURN_CODE 77 TIMEOUT 600)

  set(command_tests train_test compare_test resume_test runs_test loop_test sample_test)
  foreach(name IN LISTS command_tests)
    add_test(NAME ${name} COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/${name}.py $<TARGET_FILE:scruple_cli>)
  endforeach()
  set_tests_properties(train_test compare_test PROPERTIES COST 100)  # the longest begin first

  add_executable(logits ${CMAKE_CURRENT_SOURCE_DIR}/logits.cpp)
  target_link_libraries(logits PRIVATE train Threads::Threads)
  add_test(NAME logits_test COMMAND ${SCRUPLE_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/logits_test.py
                                    $<TARGET_FILE:scruple_cli> $<TARGET_FILE:logits>)
  add_executable(gradients ${CMAKE_CURRENT_SOURCE_DIR}/gradients.cpp)
  target_link_libraries(gradients PRIVATE train Threads::Threads)
  add_test(NAME gradients_test COMMAND ${SCRUPLE_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/gradients_test.py
                                       $<TARGET_FILE:gradients>)
  add_test(NAME folders_test COMMAND ${SCRUPLE_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/folders_test.py
                                     $<TARGET_FILE:scruple_cli>)
  add_test(NAME models_test COMMAND ${SCRUPLE_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/models_test.py
                                    $<TARGET_FILE:scruple_cli>)
  add_test(NAME safetensors_interop
           COMMAND ${SCRUPLE_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/safetensors_interop_test.py
                   $<TARGET_FILE:safetensors_test>)
  add_test(NAME tokenizer_test COMMAND ${SCRUPLE_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/tokenizer_test.py
                                       $<TARGET_FILE:scruple_cli>)
  add_executable(chats ${CMAKE_CURRENT_SOURCE_DIR}/chats.cpp)
  target_link_libraries(chats PRIVATE train Threads::Threads)
  add_test(NAME chats_test COMMAND ${SCRUPLE_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/chats_test.py
                                   $<TARGET_FILE:scruple_cli> $<TARGET_FILE:chats>)
  set_tests_properties(logits_test gradients_test folders_test models_test safetensors_interop tokenizer_test chats_test
                       PROPERTIES SKIP_RETURN_CODE 77)
  if(NOT CMAKE_CXX_FLAGS MATCHES "fsanitize")  # which Python cannot load
    add_test(NAME newcomer_test COMMAND ${SCRUPLE_PYTHON} -W ignore ${CMAKE_CURRENT_SOURCE_DIR}/newcomer_test.py
                                        ${CMAKE_BINARY_DIR})
    set_tests_properties(newcomer_test PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 1800 PROCESSORS 2 COST 100)
  endif()
  # In a sanitizer build each of their many processes would look for leaks for seconds; compare_report and
  # train_report do it. They are of the commands, whatever trains, and of limits and engines of the CPU.
  set_tests_properties(${command_tests} logits_test gradients_test folders_test models_test safetensors_interop
                       tokenizer_test chats_test PROPERTIES ENVIRONMENT "ASAN_OPTIONS=detect_leaks=0;SCRUPLE_DEVICE=cpu" TIMEOUT 1800)
endif()
