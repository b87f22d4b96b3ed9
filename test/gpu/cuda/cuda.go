// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cuda is the least of CUDA's driver API by which a program uses the first GPU that it sees: memory, a kernel that computes, and
// one that fails. The library is loaded when it is first needed, as programs do: nothing here needs CUDA to be built.
//
// The functions and their values are of "CUDA Driver API" (docs.nvidia.com/cuda/cuda-driver-api); the kernels are PTX, so the driver's own
// compiler is needed too.
package cuda

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

typedef int (*init_fn)(unsigned);
typedef int (*version_fn)(int *);
typedef int (*count_fn)(int *);
typedef int (*device_fn)(int *, int);
typedef int (*uuid_fn)(unsigned char *, int);
typedef int (*attribute_fn)(int *, int, int);
typedef int (*retain_fn)(void **, int);
typedef int (*current_fn)(void *);
typedef int (*alloc_fn)(uint64_t *, size_t);
typedef int (*set_fn)(uint64_t, unsigned, size_t);
typedef int (*get_fn)(void *, uint64_t, size_t);
typedef int (*info_fn)(size_t *, size_t *);
typedef int (*load_fn)(void **, const void *);
typedef int (*function_fn)(void **, void *, const char *);
typedef int (*launch_fn)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
typedef int (*sync_fn)(void);
typedef int (*name_fn)(int, const char **);

static int cuda_init(void *f) { return ((init_fn)f)(0); }
static int cuda_int(void *f, int *v) { return ((version_fn)f)(v); }
static int cuda_device(void *f, int *d) { return ((device_fn)f)(d, 0); }
static int cuda_uuid(void *f, unsigned char *u, int d) { return ((uuid_fn)f)(u, d); }
static int cuda_attribute(void *f, int *v, int a, int d) { return ((attribute_fn)f)(v, a, d); }
static int cuda_retain(void *f, void **c, int d) { return ((retain_fn)f)(c, d); }
static int cuda_current(void *f, void *c) { return ((current_fn)f)(c); }
static int cuda_alloc(void *f, uint64_t *p, size_t n) { return ((alloc_fn)f)(p, n); }
static int cuda_set(void *f, uint64_t p, unsigned v, size_t n) { return ((set_fn)f)(p, v, n); }
static int cuda_get(void *f, void *to, uint64_t p, size_t n) { return ((get_fn)f)(to, p, n); }
static int cuda_info(void *f, size_t *free, size_t *total) { return ((info_fn)f)(free, total); }
static int cuda_load(void *f, void **m, const void *text) { return ((load_fn)f)(m, text); }
static int cuda_function(void *f, void **k, void *m, const char *name) { return ((function_fn)f)(k, m, name); }
static int cuda_launch(void *f, void *k, unsigned blocks, unsigned threads, uint64_t p, unsigned n) {
	void *args[] = {&p, &n};
	return ((launch_fn)f)(k, blocks, 1, 1, threads, 1, 1, 0, NULL, args, NULL);
}
static int cuda_sync(void *f) { return ((sync_fn)f)(); }
static int cuda_name(void *f, int result, const char **name) { return ((name_fn)f)(result, name); }
*/
import "C"

import (
	"encoding/hex"
	"errors"
	"fmt"
	"unsafe"
)

// kernels are "add", which adds its index to each number of an array, and "fault", which writes where no memory is.
const kernels = `.version 6.0
.target sm_50
.address_size 64
.visible .entry add(.param .u64 array, .param .u32 count) {
	.reg .pred %p;
	.reg .b32 %r<6>;
	.reg .b64 %rd<4>;
	ld.param.u64 %rd1, [array];
	ld.param.u32 %r1, [count];
	mov.u32 %r2, %ctaid.x;
	mov.u32 %r3, %ntid.x;
	mov.u32 %r4, %tid.x;
	mad.lo.u32 %r4, %r2, %r3, %r4;
	setp.ge.u32 %p, %r4, %r1;
	@%p bra END;
	cvta.to.global.u64 %rd1, %rd1;
	mul.wide.u32 %rd2, %r4, 4;
	add.u64 %rd2, %rd1, %rd2;
	ld.global.u32 %r5, [%rd2];
	add.u32 %r5, %r5, %r4;
	st.global.u32 [%rd2], %r5;
END:
	ret;
}
.visible .entry fault(.param .u64 array, .param .u32 count) {
	.reg .b32 %r<2>;
	.reg .b64 %rd<2>;
	mov.u64 %rd1, 0;
	mov.u32 %r1, 1;
	st.global.u32 [%rd1], %r1;
	ret;
}
`

// Error is a result of the driver API other than CUDA_SUCCESS.
type Error struct {
	Call string
	Code int
	// Name such as CUDA_ERROR_NO_DEVICE.
	Name string
}

func (e *Error) Error() string { return fmt.Sprintf("%s: %s (%d)", e.Call, e.Name, e.Code) }

// GPU is the first GPU that this process sees, with a context on it. One thread uses it.
type GPU struct {
	library unsafe.Pointer
	module  unsafe.Pointer
	// UUID as NVML has it, GPU-….
	UUID string
	// Processors is how many of its multiprocessors this process may use.
	Processors int
}

// Open loads the driver's library and makes a context.
func Open() (*GPU, error) {
	name := C.CString("libcuda.so.1")
	defer C.free(unsafe.Pointer(name))
	library := C.dlopen(name, C.RTLD_NOW)
	if library == nil {
		return nil, errors.New(C.GoString(C.dlerror()))
	}
	g := &GPU{library: library}
	const multiprocessorCount = 16 // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
	var device, count, processors C.int
	var uuid [16]C.uchar
	var context unsafe.Pointer
	steps := []struct {
		name string
		call func(f unsafe.Pointer) C.int
	}{
		{"cuInit", func(f unsafe.Pointer) C.int { return C.cuda_init(f) }},
		{"cuDeviceGetCount", func(f unsafe.Pointer) C.int { return C.cuda_int(f, &count) }},
		{"cuDeviceGet", func(f unsafe.Pointer) C.int { return C.cuda_device(f, &device) }},
		{"cuDeviceGetUuid_v2", func(f unsafe.Pointer) C.int { return C.cuda_uuid(f, &uuid[0], device) }},
		{"cuDevicePrimaryCtxRetain", func(f unsafe.Pointer) C.int { return C.cuda_retain(f, &context, device) }},
		{"cuCtxSetCurrent", func(f unsafe.Pointer) C.int { return C.cuda_current(f, context) }},
		{"cuDeviceGetAttribute", func(f unsafe.Pointer) C.int { return C.cuda_attribute(f, &processors, multiprocessorCount, device) }},
	}
	for _, step := range steps {
		if err := g.call(step.name, step.call); err != nil {
			return nil, err
		}
	}
	h := hex.EncodeToString(C.GoBytes(unsafe.Pointer(&uuid[0]), C.int(len(uuid))))
	g.UUID = fmt.Sprintf("GPU-%s-%s-%s-%s-%s", h[:8], h[8:12], h[12:16], h[16:20], h[20:])
	g.Processors = int(processors)
	return g, nil
}

// Alloc takes that many bytes of the GPU's memory until the process ends.
func (g *GPU) Alloc(bytes uint64) (address uint64, err error) {
	var p C.uint64_t
	err = g.call("cuMemAlloc_v2", func(f unsafe.Pointer) C.int { return C.cuda_alloc(f, &p, C.size_t(bytes)) })
	return uint64(p), err
}

// Memory returns how much of the GPU's memory is free for this process, and how much there is for it, in bytes.
func (g *GPU) Memory() (free, total uint64, err error) {
	var f0, t0 C.size_t
	err = g.call("cuMemGetInfo_v2", func(f unsafe.Pointer) C.int { return C.cuda_info(f, &f0, &t0) })
	return uint64(f0), uint64(t0), err
}

// Compute runs a kernel and looks at what it has written.
func (g *GPU) Compute() error {
	const count = 1 << 20
	array, err := g.Alloc(4 * count)
	if err != nil {
		return err
	}
	if err := g.call("cuMemsetD32_v2", func(f unsafe.Pointer) C.int { return C.cuda_set(f, C.uint64_t(array), 7, count) }); err != nil {
		return err
	}
	if err := g.run("add", array, count); err != nil {
		return err
	}
	got := make([]uint32, count)
	if err := g.call("cuMemcpyDtoH_v2", func(f unsafe.Pointer) C.int {
		return C.cuda_get(f, unsafe.Pointer(&got[0]), C.uint64_t(array), 4*count)
	}); err != nil {
		return err
	}
	for i, n := range got {
		if n != uint32(i)+7 {
			return fmt.Errorf("number %d is %d, not %d", i, n, i+7)
		}
	}
	return nil
}

// Fault runs a kernel that writes where no memory is, and returns what the driver says of it.
func (g *GPU) Fault() error { return g.run("fault", 0, 0) }

func (g *GPU) run(kernel string, array uint64, count uint32) error {
	if g.module == nil {
		text := C.CString(kernels)
		defer C.free(unsafe.Pointer(text))
		if err := g.call("cuModuleLoadData",
			func(f unsafe.Pointer) C.int { return C.cuda_load(f, &g.module, unsafe.Pointer(text)) }); err != nil {
			return err
		}
	}
	name := C.CString(kernel)
	defer C.free(unsafe.Pointer(name))
	var function unsafe.Pointer
	if err := g.call("cuModuleGetFunction",
		func(f unsafe.Pointer) C.int { return C.cuda_function(f, &function, g.module, name) }); err != nil {
		return err
	}
	const threads = 256
	blocks := max((count+threads-1)/threads, 1)
	if err := g.call("cuLaunchKernel", func(f unsafe.Pointer) C.int {
		return C.cuda_launch(f, function, C.uint(blocks), threads, C.uint64_t(array), C.uint(count))
	}); err != nil {
		return err
	}
	return g.call("cuCtxSynchronize", func(f unsafe.Pointer) C.int { return C.cuda_sync(f) })
}

func (g *GPU) call(name string, call func(f unsafe.Pointer) C.int) error {
	f, err := g.symbol(name)
	if err != nil {
		return err
	}
	result := call(f)
	if result == 0 {
		return nil
	}
	failed := &Error{Call: name, Code: int(result)}
	if f, err := g.symbol("cuGetErrorName"); err == nil {
		var text *C.char
		if C.cuda_name(f, result, &text) == 0 {
			failed.Name = C.GoString(text)
		}
	}
	return failed
}

func (g *GPU) symbol(name string) (unsafe.Pointer, error) {
	n := C.CString(name)
	defer C.free(unsafe.Pointer(n))
	f := C.dlsym(g.library, n)
	if f == nil {
		return nil, fmt.Errorf("libcuda.so.1 has no %s", name)
	}
	return f, nil
}
