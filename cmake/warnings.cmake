# Warnings for our own code; errors while we develop, never for those who only build it.
add_compile_options(-Wall -Wextra -Wpedantic -Wshadow)
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wconversion>)
if(SCRUPLE_DEVELOPER)
  add_compile_options(-Werror)
endif()
