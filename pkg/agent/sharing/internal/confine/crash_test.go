// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package confine

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestAHelperThatNobodyWaitsForGivesUp once it is in the cgroup: its agent was killed after it had said what to run, and the next
// agent has started another helper there.
func TestAHelperThatNobodyWaitsForGivesUp(t *testing.T) {
	for kind, c := range kinds(t) {
		for _, waits := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, waits=%t", kind, waits), func(t *testing.T) {
				g, folder := c.Group("late"), t.TempDir()
				end(t, g)
				if err := g.Make(); err != nil {
					t.Fatal(err)
				}
				reader, writer, err := os.Pipe()
				if err != nil {
					t.Fatal(err)
				}
				defer reader.Close()
				defer writer.Close()
				helper := exec.Command("/proc/self/exe", Command)
				helper.Dir, helper.ExtraFiles = "/", []*os.File{writer}
				stdin, err := helper.StdinPipe()
				if err == nil {
					err = helper.Start()
				}
				if err != nil {
					t.Fatal(err)
				}
				if !waits {
					if err := reader.Close(); err != nil {
						t.Error(err)
					}
				}
				told, err := json.Marshal(orders{Program: shell(folder, "touch /tmp/own/ran"), Doors: g.doors()})
				if err != nil {
					t.Fatal(err)
				}
				if _, err := stdin.Write(told); err != nil {
					t.Error(err)
				}
				if ended := helper.Wait(); (ended == nil) != waits {
					t.Errorf("the helper: %v", ended)
				}
				if _, err := os.Stat(filepath.Join(folder, "ran")); (err == nil) != waits {
					t.Errorf("whether its program ran: %v", err)
				}
			})
		}
	}
}

// TestWhatTheKubeletGivesTheAgentAlone is none of the program's: an agent has the score of its pod, -997 of a critical one. Here it is
// one that takes no right.
func TestWhatTheKubeletGivesTheAgentAlone(t *testing.T) {
	const path = "/proc/self/oom_score_adj"
	for kind, c := range kinds(t) {
		for _, unconfined := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, unconfined=%t", kind, unconfined), func(t *testing.T) {
				before, err := os.ReadFile(path)
				if err == nil {
					err = write(path, "500")
				}
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					if err := write(path, strings.TrimSpace(string(before))); err != nil {
						t.Error(err)
					}
				})
				g, folder := c.Group("score"), t.TempDir()
				end(t, g)
				p := shell(folder, "cat "+path+"; ulimit -c")
				p.Unconfined = unconfined
				if err := errors.Join(g.Make(), g.Start(t.Context(), "", p)); err != nil {
					t.Fatal(err)
				}
				until(t, "it has ended", func() bool { return len(processes(t, g)) == 0 })
				if said, err := os.ReadFile(filepath.Join(folder, "output")); err != nil || string(said) != "0\n0\n" {
					t.Errorf("score, and size of a core dump: %q, %v", said, err)
				}
			})
		}
	}
}
