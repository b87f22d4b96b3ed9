// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package confine

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Offsets in struct seccomp_data: the call's number, the architecture, and the low half of the first argument. Both of our architectures
// are little-endian.
const (
	dataNumber       = 0
	dataArchitecture = 4
	dataArgument     = 16
)

// newNamespace are all flags of clone(2) that make one. CLONE_NEWTIME is none of them: for clone(2) it is part of a signal's number.
const newNamespace = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER |
	unix.CLONE_NEWPID | unix.CLONE_NEWNET

// same is personality(2)'s argument that asks for the one there is.
const same = 0xffffffff

func statement(code uint16, k uint32) unix.SockFilter { return unix.SockFilter{Code: code, K: k} }

// unless skips so many instructions if the value is not that.
func unless(is uint16, k uint32, skip uint8) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_K | is, K: k, Jf: skip}
}

// ifIs skips so many instructions if the value is that.
func ifIs(k uint32, skip uint8) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_K | unix.BPF_JEQ, K: k, Jt: skip}
}

func refuse(errno unix.Errno) unix.SockFilter {
	return statement(unix.BPF_RET|unix.BPF_K, unix.SECCOMP_RET_ERRNO|uint32(errno))
}

func load(offset uint32) unix.SockFilter {
	return statement(unix.BPF_LD|unix.BPF_W|unix.BPF_ABS, offset)
}

var (
	allow = statement(unix.BPF_RET|unix.BPF_K, unix.SECCOMP_RET_ALLOW)
	kill  = statement(unix.BPF_RET|unix.BPF_K, unix.SECCOMP_RET_KILL_PROCESS)
)

// filter is what systemd makes of SystemCallArchitectures=native, RestrictAddressFamilies=AF_UNIX AF_NETLINK, RestrictNamespaces=yes and
// LockPersonality=yes. io_uring goes, too: it makes sockets that no filter sees.
func filter() []unix.SockFilter {
	const equal, greaterOrEqual, anyBit = unix.BPF_JEQ, unix.BPF_JGE, unix.BPF_JSET
	program := []unix.SockFilter{
		load(dataArchitecture),
		ifIs(architecture, 1),
		kill,
		load(dataNumber),
	}
	program = append(program, unless(greaterOrEqual, firstForeign, 1), refuse(unix.ENOSYS))
	call := func(number uintptr, then ...unix.SockFilter) {
		program = append(program, unless(equal, uint32(number), uint8(len(then))))
		program = append(program, then...)
	}
	call(unix.SYS_SOCKET,
		load(dataArgument),
		ifIs(unix.AF_UNIX, 2),
		ifIs(unix.AF_NETLINK, 1),
		refuse(unix.EAFNOSUPPORT),
		allow)
	call(unix.SYS_CLONE, load(dataArgument), unless(anyBit, newNamespace, 1), refuse(unix.EPERM), allow)
	// Its flags are in memory, where a filter does not see them. Libraries take clone in its place.
	call(unix.SYS_CLONE3, refuse(unix.ENOSYS))
	call(unix.SYS_UNSHARE, load(dataArgument), unless(anyBit, newNamespace|unix.CLONE_NEWTIME, 1), refuse(unix.EPERM), allow)
	call(unix.SYS_SETNS, refuse(unix.EPERM))
	call(unix.SYS_PERSONALITY, load(dataArgument), ifIs(same, 1), refuse(unix.EPERM), allow)
	call(unix.SYS_IO_URING_SETUP, refuse(unix.EPERM))
	return append(program, allow)
}

// filterCalls puts the filter on this thread, and on what it becomes.
func filterCalls() error {
	instructions := filter()
	program := unix.SockFprog{Len: uint16(len(instructions)), Filter: &instructions[0]}
	if _, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&program))); errno != 0 {
		return fmt.Errorf("filter system calls: %w", errno)
	}
	return nil
}
