# What `cmake --install` leaves: library, headers, command line, and what find_package and pkg-config look for. The whole
# tree may be moved afterwards.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(program_dir ${CMAKE_INSTALL_BINDIR})
set(library_dir ${CMAKE_INSTALL_LIBDIR})
set(include_dir ${CMAKE_INSTALL_INCLUDEDIR})
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/scruple)
set(pkgconfig_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(SKBUILD)
  # A wheel holds the same tree inside the Python package, with the library beside the Python files that open it by its
  # path: one file under its plain name, since a wheel cannot hold symbolic links. The command line, where it is built, is
  # in bin/, and python/scruple/__main__.py starts it. pyproject.toml sees to the rest.
  set(program_dir scruple/bin)
  set(library_dir scruple)
  set(include_dir scruple/include)
  set(package_dir scruple/lib/cmake/scruple)
  set(pkgconfig_dir scruple/lib/pkgconfig)
  set_property(TARGET scruple PROPERTY VERSION)
  set_property(TARGET scruple PROPERTY SOVERSION)
  set(binaries scruple)
  if(SCRUPLE_CLI)
    list(APPEND binaries scruple_cli)
    # The trainer's libraries where they were found, should the loader not look there: in a conda environment.
    set_target_properties(scruple_cli PROPERTIES INSTALL_RPATH "$ORIGIN/.." INSTALL_RPATH_USE_LINK_PATH ON)
  endif()
  # With libstdc++ inside they load in a conda environment too, whose own copy may be older than the compiler.
  include(CheckLinkerFlag)
  check_linker_flag(CXX -static-libstdc++ SCRUPLE_HAS_STATIC_LIBSTDCXX)
  # Linked against an older glibc than this machine's, they run on that one too (scripts/old_glibc.sh).
  set(SCRUPLE_OLD_GLIBC "" CACHE PATH "The root of an older glibc to link against")
  foreach(binary IN LISTS binaries)
    if(SCRUPLE_HAS_STATIC_LIBSTDCXX)
      target_link_options(${binary} PRIVATE -static-libstdc++ -static-libgcc)
    endif()
    if(SCRUPLE_OLD_GLIBC)
      set(lib ${CMAKE_LIBRARY_ARCHITECTURE})
      target_sources(${binary} PRIVATE cmake/old_glibc.c)
      target_link_options(${binary} PRIVATE --sysroot=${SCRUPLE_OLD_GLIBC} -L${SCRUPLE_OLD_GLIBC}/usr/lib/${lib}
                          -L${SCRUPLE_OLD_GLIBC}/lib/${lib} -Wl,-z,defs)
      target_link_libraries(${binary} PRIVATE -lpthread -ldl -lrt)  # libraries of their own before 2.34
    endif()
  endforeach()
endif()

install(TARGETS scruple EXPORT scruple-targets LIBRARY DESTINATION ${library_dir} INCLUDES DESTINATION ${include_dir})
install(FILES include/scruple/scruple.h include/scruple/scruple.hpp DESTINATION ${include_dir}/scruple)
if(SCRUPLE_CLI)
  install(TARGETS scruple_cli RUNTIME DESTINATION ${program_dir})
endif()

install(EXPORT scruple-targets NAMESPACE scruple:: DESTINATION ${package_dir})
configure_package_config_file(cmake/scruple-config.cmake.in ${CMAKE_BINARY_DIR}/scruple-config.cmake
                              INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may break its users.
write_basic_package_version_file(${CMAKE_BINARY_DIR}/scruple-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/scruple-config.cmake ${CMAKE_BINARY_DIR}/scruple-config-version.cmake
        DESTINATION ${package_dir})

file(RELATIVE_PATH root_from_pkgconfig /${pkgconfig_dir} /)
configure_file(cmake/scruple.pc.in ${CMAKE_BINARY_DIR}/scruple.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/scruple.pc DESTINATION ${pkgconfig_dir})
