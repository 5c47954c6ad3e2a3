# What every C file of the house is compiled with: warnings, sanitizers, include paths.

add_library(ingot_sanitizers INTERFACE)
if(INGOT_SANITIZE)
	set(sanitize -fsanitize=${INGOT_SANITIZE} -fno-omit-frame-pointer)
	if(INGOT_SANITIZE MATCHES "undefined")
		list(APPEND sanitize -fno-sanitize-recover=all)
	endif()
	target_compile_options(ingot_sanitizers INTERFACE ${sanitize})
	target_link_options(ingot_sanitizers INTERFACE ${sanitize})
endif()

# In a kernel each vector load would be checked for a null pointer, its object's size and an overflowing address as well:
# four times the compile time for what the address sanitizer sees at the access itself.
add_library(ingot_kernel_sanitizers INTERFACE)
target_link_libraries(ingot_kernel_sanitizers INTERFACE ingot_flags)
if(INGOT_SANITIZE MATCHES "undefined")
	target_compile_options(ingot_kernel_sanitizers INTERFACE -fno-sanitize=null,object-size,pointer-overflow)
endif()

# -Wconversion stays off: in index arithmetic over mixed widths its casts hide more than they show.
add_library(ingot_flags INTERFACE)
target_link_libraries(ingot_flags INTERFACE ingot_sanitizers)
target_compile_options(ingot_flags INTERFACE
	-Wall -Wextra -Wpedantic -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wold-style-definition
	-Wundef -Wvla -Wwrite-strings -Wpointer-arith -Wimplicit-fallthrough
	# A cmocka test must take a state that few need.
	$<$<BOOL:$<TARGET_PROPERTY:INGOT_TEST>>:-Wno-unused-parameter>
	$<$<BOOL:${INGOT_WERROR}>:-Werror>)
# One rounding for one line of source in every build: a fused product here and not there would make results depend on
# the compiler. Kernels that want fused products ask for them by intrinsic.
target_compile_options(ingot_flags INTERFACE -ffp-contract=off -fno-strict-aliasing -fno-math-errno)
target_compile_definitions(ingot_flags INTERFACE _GNU_SOURCE= INGOT_VERSION="${PROJECT_VERSION}")
target_include_directories(ingot_flags INTERFACE ${CMAKE_CURRENT_SOURCE_DIR}/include ${CMAKE_CURRENT_SOURCE_DIR}/src)
