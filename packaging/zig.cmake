# Zig as the C++ compiler for another platform: it brings its own C++ library, linked statically, and
# old versions of the platforms' C libraries.
#
#     cmake -DCMAKE_TOOLCHAIN_FILE=packaging/zig.cmake -DKVPACT_ZIG=…/zig -DKVPACT_TARGET=aarch64-linux-gnu.2.17
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES KVPACT_ZIG KVPACT_TARGET)
if(KVPACT_TARGET MATCHES "^([a-z0-9_]+)-linux")
  set(CMAKE_SYSTEM_NAME Linux)
elseif(KVPACT_TARGET MATCHES "^([a-z0-9_]+)-macos")
  set(CMAKE_SYSTEM_NAME Darwin)
elseif(KVPACT_TARGET MATCHES "^([a-z0-9_]+)-windows")
  set(CMAKE_SYSTEM_NAME Windows)
else()
  message(FATAL_ERROR "KVPACT_TARGET=${KVPACT_TARGET} is no platform that wheels are built for")
endif()
set(CMAKE_SYSTEM_PROCESSOR ${CMAKE_MATCH_1})
set(CMAKE_CXX_COMPILER ${KVPACT_ZIG} c++ -target ${KVPACT_TARGET})
# Zig would add what debuggers read.
set(CMAKE_CXX_FLAGS_INIT -g0)
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
set(CMAKE_MODULE_LINKER_FLAGS_INIT -s)
# Else CMake names libraries of Windows that Zig would compile first, though nothing needs them.
set(CMAKE_CXX_STANDARD_LIBRARIES "" CACHE STRING "")
# CMake asks for this tool, and installing needs none.
set(CMAKE_INSTALL_NAME_TOOL ${CMAKE_COMMAND})
