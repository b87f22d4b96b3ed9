// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// A run that waits for nothing is ended when its time is over, and one that ends by itself is not.
func TestARunThatDoesNotEndIsEnded(t *testing.T) {
	tests := map[string]struct {
		command []string
		ended   bool
	}{
		"it sleeps":          {[]string{"sleep", "60"}, true},
		"it uses the time":   {[]string{"sh", "-c", "while :; do :; done"}, true},
		"it ends by itself":  {[]string{"true"}, false},
		"it fails by itself": {[]string{"false"}, false},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := watched{cmd: exec.CommandContext(t.Context(), tc.command[0], tc.command[1:]...), patience: time.Second}
			err := w.run()
			if w.ended != tc.ended || tc.ended && (err == nil || w.took < w.patience) {
				t.Errorf("ended: %v after %s, error %v", w.ended, w.took, err)
			}
		})
	}
	none := watched{cmd: exec.CommandContext(t.Context(), "./no-such-program"), patience: time.Minute}
	if err := none.run(); err == nil {
		t.Error("there is no such program, and no error")
	}
}

func TestThreads(t *testing.T) {
	type thread struct{ stat, schedstat string }
	const second = "1000000000"
	tests := map[string]struct {
		threads map[string]thread
		wants   bool
		sum     time.Duration
	}{
		"no process": {},
		"all sleep": {
			threads: map[string]thread{"7": {"7 (a) S 1 7", second + " 0 3\n"}, "8": {"8 (a) S 1 7", second + " " + second + " 3\n"}},
			sum:     2 * time.Second,
		},
		"one wants a processor": {
			threads: map[string]thread{"7": {"7 (a) S 1 7", second + " 0 3\n"}, "8": {"8 (a) R 1 7", "5 " + second + " 3\n"}},
			wants:   true, sum: time.Second + 5,
		},
		"the name is like a state": {
			threads: map[string]thread{"7": {"7 (a R) S 1 7", "5 0 3\n"}},
			sum:     5,
		},
		"one has just ended, and one cannot be read": {
			threads: map[string]thread{"7": {}, "8": {stat: "8 (a) R 1 7"}, "9": {"9 (a) R 1 7", "?\n"}},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			folder := t.TempDir()
			for id, thread := range tc.threads {
				for file, text := range map[string]string{"stat": thread.stat, "schedstat": thread.schedstat} {
					if text != "" {
						write(t, filepath.Join(folder, id, file), text)
					}
				}
			}
			if wants, sum := threads(folder); wants != tc.wants || sum != tc.sum {
				t.Errorf("%v, %s, want %v, %s", wants, sum, tc.wants, tc.sum)
			}
		})
	}
}

// What a run sleeps before the first look is part of what it takes.
func TestTheTimeBeforeTheFirstLookCounts(t *testing.T) {
	for sleeps, least := range map[string]time.Duration{"0.1": 100 * time.Millisecond, "0.3": 300 * time.Millisecond} {
		w := watched{cmd: exec.CommandContext(t.Context(), "sleep", sleeps), patience: time.Minute}
		if err := w.run(); err != nil || w.took < least {
			t.Errorf("sleep %s took %s, error %v, want at least %s", sleeps, w.took, err, least)
		}
	}
}
