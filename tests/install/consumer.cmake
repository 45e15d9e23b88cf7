# The project of someone who uses an installed Scruple.
cmake_minimum_required(VERSION 3.22)
project(example LANGUAGES CXX)
find_package(scruple 0.2 REQUIRED)
add_executable(example example.cpp)
target_compile_options(example PRIVATE -Wall -Wextra -Wpedantic -Werror)
target_link_libraries(example PRIVATE scruple::scruple)
