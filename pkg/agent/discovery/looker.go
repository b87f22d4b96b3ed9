// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"stowage.dev/stowage/pkg/agent/nvml"
)

// AnswerTimeout is how long NVML may take to answer about one GPU.
const AnswerTimeout = 10 * time.Second

// ErrHung means that a call into NVML about a GPU has not returned. It cannot be
// cancelled.
var ErrHung = errors.New("NVML does not answer")

// Looker discovers again and again. Its zero value is ready for use. A GPU about
// which a call from an earlier time still hangs is not asked again: each such
// call holds a thread.
type Looker struct {
	// Using, if it is not nil, is called before each call about a GPU, and done after it: such a call may outlive the
	// look, and the library must not be closed under it.
	Using func() (done func())

	mu sync.Mutex
	// hung has, by NVML's index, a channel that is closed when the call returns.
	hung map[int]<-chan struct{}
}

// ask asks about one GPU, for AnswerTimeout at most.
func (l *Looker) ask(ctx context.Context, index int, lib nvml.Library, sysfs fs.ReadLinkFS) (*found, error) {
	if l.hangs(index) {
		return &found{gpu: GPU{Index: index}}, fmt.Errorf("GPU %d: %w, since an earlier time", index, ErrHung)
	}
	f := &found{gpu: GPU{Index: index}}
	var answer error // once done is closed
	done := make(chan struct{})
	release := func() {}
	if l.Using != nil {
		release = l.Using()
	}
	go func() {
		defer release()
		defer close(done)
		if answer = f.ask(lib); answer == nil {
			f.askBus(sysfs)
			f.askLanes(sysfs)
			f.askNVLink()
		}
	}()
	timeout := time.NewTimer(AnswerTimeout)
	defer timeout.Stop()
	var err error
	select {
	case <-done:
		return f, answer
	case <-timeout.C:
		err = fmt.Errorf("GPU %d: %w for %s", index, ErrHung, AnswerTimeout)
	case <-ctx.Done():
		err = fmt.Errorf("GPU %d: %w", index, ctx.Err())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.hung == nil {
		l.hung = map[int]<-chan struct{}{}
	}
	l.hung[index] = done
	// The call still has the other one.
	return &found{gpu: GPU{Index: index}}, err
}

func (l *Looker) hangs(index int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	done, ok := l.hung[index]
	if !ok {
		return false
	}
	select {
	case <-done:
		delete(l.hung, index)
		return false
	default:
		return true
	}
}
