# Puts a style sheet and a script into a page, at {{style}} and {{script}}, and the page into a C++ header as kPage.
# {{title}} and {{data}} are left to train/run/report.cpp.
# usage: cmake -P embed.cmake PAGE.html STYLE.css SCRIPT.js HEADER.h
file(READ "${CMAKE_ARGV3}" page)
file(READ "${CMAKE_ARGV4}" style)
file(READ "${CMAKE_ARGV5}" script)
foreach(part title data style script)
  if(NOT page MATCHES "{{${part}}}")
    message(FATAL_ERROR "${CMAKE_ARGV3} has no {{${part}}}, where the ${part} would go")
  endif()
endforeach()
foreach(part style script)
  string(REPLACE "{{${part}}}" "${${part}}" page "${page}")
endforeach()
# A raw string ends at this mark alone, so nothing else in the page has to be written another way.
if(page MATCHES "\\)page\"")
  message(FATAL_ERROR "${CMAKE_ARGV3}, or what goes into it, has )page\" in it, which ends a raw string")
endif()
file(WRITE "${CMAKE_ARGV6}" "// Made by cmake/embed.cmake.
#pragma once

namespace scruple::train {
inline constexpr char kPage[] = R\"page(${page})page\";
}
")
