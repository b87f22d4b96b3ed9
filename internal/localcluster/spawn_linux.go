// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"runtime"
	"sync"
	"syscall"
)

// childAttributes gives a child a process group of its own, so that a Ctrl-C at
// the terminal reaches us alone and we stop the children in order, and asks the
// kernel to kill it when the thread that started it dies.
func childAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// spawnThread runs functions on one OS thread that never ends before the
// process does. A parent-death signal is bound to the parent thread, and Go ends
// a thread whose locked goroutine returns: started from just any goroutine, a
// child could be killed while we live.
var spawnThread = sync.OnceValue(func() chan<- func() {
	work := make(chan func())
	go func() {
		runtime.LockOSThread()
		for f := range work {
			f()
		}
	}()
	return work
})

func onSpawnThread(f func()) {
	done := make(chan struct{})
	spawnThread() <- func() {
		defer close(done)
		f()
	}
	<-done
}
