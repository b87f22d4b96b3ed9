// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// testProgram plays a test program of integration tests whose result, or "hang",
// is in RESULT.
func testProgram() {
	var cluster *Cluster
	tests := runFunc(func() int {
		fmt.Println(cluster.Dir())
		if os.Getenv("RESULT") == "hang" {
			select {}
		}
		code, err := strconv.Atoi(os.Getenv("RESULT"))
		if err != nil {
			panic(err)
		}
		return code
	})
	os.Exit(RunTests(tests, Options{WithoutControllerManager: true}, func(c *Cluster) { cluster = c }))
}

type runFunc func() int

func (f runFunc) Run() int { return f() }

func TestRunTestsStopsTheClusterInTheEnd(t *testing.T) {
	skipIfShort(t)
	tests := map[string]struct {
		result   string
		wantCode int
		wantKept bool
	}{
		"after success":                       {result: "0", wantCode: 0},
		"after a failure, and keeps its logs": {result: "3", wantCode: 3, wantKept: true},
		"on Ctrl-C while a test runs":         {result: "hang", wantCode: 130},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			program := exec.Command(os.Args[0])
			program.Env = append(os.Environ(), childMode+"=tests", "RESULT="+test.result, "TMPDIR="+t.TempDir())
			var progress strings.Builder
			program.Stderr = &progress
			out, err := program.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := program.Start(); err != nil {
				t.Fatal(err)
			}
			dir, err := bufio.NewReader(out).ReadString('\n')
			if err != nil {
				t.Fatalf("%v\n%s", err, &progress)
			}
			dir = strings.TrimSpace(dir)
			if test.result == "hang" {
				if err := program.Process.Signal(syscall.SIGINT); err != nil {
					t.Fatal(err)
				}
			}
			_ = program.Wait()
			if got := program.ProcessState.ExitCode(); got != test.wantCode {
				t.Errorf("exit status is %d, want %d; it wrote:\n%s", got, test.wantCode, &progress)
			}
			if got := processesOf(t, dir); len(got) > 0 {
				t.Errorf("still running are %v", got)
			}
			if got := pathExists(filepath.Join(dir, "logs", "kube-apiserver.log")); got != test.wantKept {
				t.Errorf("logs exist: %t, want %t", got, test.wantKept)
			}
		})
	}
}
