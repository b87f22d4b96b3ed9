// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command janitor makes and removes the enclosure of one real node, and starts processes in it. See package enclosure.
//
//	janitor janitor <spec file>
//	janitor enter <pid of the janitor> <command> [argument...]
package main

import (
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"stowage.dev/stowage/internal/localcluster/node/enclosure"
)

// The main goroutine keeps the main thread: the namespace is changed for a thread, and the parent-death signal of the process was
// set on this one.
func init() { runtime.LockOSThread() }

func main() {
	var err error
	switch {
	case len(os.Args) == 3 && os.Args[1] == "janitor":
		signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGPIPE)
		var spec enclosure.Spec
		if spec, err = enclosure.ReadSpec(os.Args[2]); err == nil {
			err = enclosure.RunJanitor(spec, os.Stdin, os.Stdout)
		}
	case len(os.Args) >= 4 && os.Args[1] == "enter":
		err = enclosure.Enter(os.Args[2], os.Args[3:])
	default:
		err = fmt.Errorf("usage: janitor janitor <spec file> | janitor enter <pid> <command> [argument...]")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
