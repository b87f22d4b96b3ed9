// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package confine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The program's /dev has few devices, and what it sees at its start is nodev. Other nodes come into sight later: on what is mounted
// on the host then, and below /proc/PID/root of processes with as few rights. So the cgroup says what may be opened.

// memoryMajor and memoryMinors are the numbers of the devices that any program has (devices.txt of the kernel).
const memoryMajor = 1

var memoryMinors = []uint32{3, 5, 7, 8, 9}

// allowDevices lets processes of the cgroup, which is made, open character devices with these major numbers, and those that any
// program has. It holds as long as the cgroup.
func (g *Group) allowDevices(majors []uint32) error {
	if !g.cgroups.v2 {
		return g.allowDevicesV1(majors)
	}
	dir := g.dirs()[0]
	group, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(group)
	program, err := loadProgram(deviceProgram(majors))
	if err != nil {
		return fmt.Errorf("load what restricts devices of cgroup %s: %w", dir, err)
	}
	defer unix.Close(program)
	attributes := struct{ target, program, kind, flags uint32 }{uint32(group), uint32(program), unix.BPF_CGROUP_DEVICE, 0}
	if _, err := bpf(unix.BPF_PROG_ATTACH, unsafe.Pointer(&attributes), unsafe.Sizeof(attributes)); err != nil {
		return fmt.Errorf("restrict devices of cgroup %s: %w", dir, err)
	}
	return nil
}

// devicesV1 is the controller of v1. That of v2 is no controller.
const devicesV1 = "devices"

func (g *Group) allowDevicesV1(majors []uint32) error {
	dirs := g.dirs()
	dir := dirs[len(dirs)-1]
	err := write(filepath.Join(dir, "devices.deny"), "a")
	allow := func(device string) {
		err = errors.Join(err, write(filepath.Join(dir, "devices.allow"), "c "+device+" rwm"))
	}
	for _, minor := range memoryMinors {
		allow(fmt.Sprintf("%d:%d", memoryMajor, minor))
	}
	for _, major := range majors {
		allow(fmt.Sprintf("%d:*", major))
	}
	return err
}

// instruction is struct bpf_insn. The destination is the low half of registers; both of our architectures are little-endian.
type instruction struct {
	code, registers uint8
	skip            int16
	value           int32
}

// deviceProgram returns 1 for what may be done with a device, else 0. Its context is struct bpf_cgroup_dev_ctx.
func deviceProgram(majors []uint32) []instruction {
	const (
		context, kind, major, minor = 1, 2, 3, 4 // registers
		loadWord                    = unix.BPF_LDX | unix.BPF_W | unix.BPF_MEM
		and                         = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
		ifEqual                     = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		ifOther                     = unix.BPF_JMP | unix.BPF_JNE | unix.BPF_K
		set                         = unix.BPF_ALU64 | unix.BPF_MOV | unix.BPF_K
		exit                        = unix.BPF_JMP | unix.BPF_EXIT
	)
	answer := func(value int32) []instruction { return []instruction{{code: set, value: value}, {code: exit}} }
	// If the register has that value the answer is 1.
	allow := func(register uint8, value uint32) []instruction {
		return append([]instruction{{code: ifOther, registers: register, skip: 2, value: int32(value)}}, answer(1)...)
	}
	program := []instruction{
		{code: loadWord, registers: kind | context<<4},
		{code: and, registers: kind, value: 0xffff}, // above is whether it is to be read, written or made
		{code: loadWord, registers: major | context<<4, skip: 4},
		{code: loadWord, registers: minor | context<<4, skip: 8},
		{code: ifEqual, registers: kind, skip: 2, value: unix.BPF_DEVCG_DEV_CHAR},
	}
	program = append(program, answer(0)...)
	for _, number := range majors {
		program = append(program, allow(major, number)...)
	}
	program = append(program, instruction{code: ifEqual, registers: major, skip: 2, value: memoryMajor})
	program = append(program, answer(0)...)
	for _, number := range memoryMinors {
		program = append(program, allow(minor, number)...)
	}
	return append(program, answer(0)...)
}

func loadProgram(program []instruction) (fd int, err error) {
	license := [1]byte{} // none: it calls no function of the kernel's
	var pinner runtime.Pinner
	defer pinner.Unpin()
	pinner.Pin(&program[0])
	pinner.Pin(&license)
	attributes := struct {
		kind, count           uint32
		instructions, license uint64
	}{
		unix.BPF_PROG_TYPE_CGROUP_DEVICE, uint32(len(program)),
		uint64(uintptr(unsafe.Pointer(&program[0]))), uint64(uintptr(unsafe.Pointer(&license))),
	}
	return bpf(unix.BPF_PROG_LOAD, unsafe.Pointer(&attributes), unsafe.Sizeof(attributes))
}

func bpf(command uintptr, attributes unsafe.Pointer, size uintptr) (fd int, err error) {
	result, _, errno := unix.Syscall(unix.SYS_BPF, command, uintptr(attributes), size)
	if errno != 0 {
		return 0, errno
	}
	return int(result), nil
}
