// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// watched is a run of tests that may take so long. While it wants a processor the time does not count in which it has none: the machine may
// have other things to do. Whether it wants one is asked at each look, for the time since the last. The time after the last look counts as
// it is: it cannot end the run, and without a mutant, where it makes the limit for the mutants, too long is safe and too short is not. A
// test that sleeps and ends before the first look has then taken the time that it slept.
type watched struct {
	cmd      *exec.Cmd
	patience time.Duration

	took  time.Duration // what counts
	ended bool          // it took longer
}

// A run is looked at first so long after its start, and then ever less often: each look at each thread takes the kernel time.
const firstLook, nextLook = 250 * time.Millisecond, 500 * time.Millisecond

// run is exec's, and ends the run when its time is over.
func (w *watched) run() error {
	last, ran := time.Now(), time.Duration(0)
	if err := w.cmd.Start(); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- w.cmd.Wait() }()
	pause := firstLook
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for {
		select {
		case err := <-done:
			w.took += time.Since(last)
			return err
		case now := <-timer.C:
			wants, sum := threads(fmt.Sprintf("/proc/%d/task", w.cmd.Process.Pid))
			passed := now.Sub(last)
			if wants {
				passed = min(passed, max(0, sum-ran)) // threads that have ended take their time with them
			}
			w.took += passed
			last, ran = now, sum
			if !w.ended && w.took > w.patience {
				w.ended = true
				_ = w.cmd.Process.Kill() // else it has ended just now
			}
			pause = min(2*pause, nextLook)
			timer.Reset(pause)
		}
	}
}

// threads tells whether one of a process's threads wants a processor or has one, and for how long all of them have run. folder has a folder
// for each thread (proc(5)); without it nothing is known, and none is said to want one.
func threads(folder string) (wants bool, sum time.Duration) {
	all, _ := filepath.Glob(filepath.Join(folder, "*")) // the pattern is a good one
	for _, thread := range all {
		stat, err := os.ReadFile(filepath.Join(thread, "stat"))
		if err != nil {
			continue // it has ended
		}
		schedstat, err := os.ReadFile(filepath.Join(thread, "schedstat"))
		if err != nil {
			continue
		}
		var ran int64
		if _, err := fmt.Sscan(string(schedstat), &ran); err != nil {
			continue
		}
		sum += time.Duration(ran)
		_, state, _ := strings.Cut(string(stat), ") ") // the name in front of it may have anything in it
		wants = wants || strings.HasPrefix(state, "R")
	}
	return wants, sum
}
