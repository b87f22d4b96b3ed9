// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// shell is a process that runs a script.
func shell(t *testing.T, script string) Command {
	t.Helper()
	return Command{
		Name:        "script",
		Path:        "/bin/sh",
		Args:        []string{"-c", script},
		LogFile:     filepath.Join(t.TempDir(), "script.log"),
		StopTimeout: 10 * time.Second,
	}
}

// readyWhenExists is ready when a file exists.
func readyWhenExists(path string) func(context.Context) error {
	return func(context.Context) error {
		_, err := os.Stat(path)
		return err
	}
}

func TestStopSendsSIGTERMAndIsNoUnexpectedEnd(t *testing.T) {
	ready := filepath.Join(t.TempDir(), "ready")
	command := shell(t, `trap 'echo ending; exit 0' TERM; : >`+ready+`; while :; do sleep 0.05; done`)
	command.Ready = readyWhenExists(ready)
	p, err := StartProcess(t.Context(), command)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Err(); err != nil {
		t.Errorf("running process has error %v", err)
	}
	for range 2 { // the second time there is nothing to do
		if err := p.Stop(); err != nil {
			t.Errorf("Stop: %v", err)
		}
	}
	if err := p.Err(); err != nil {
		t.Errorf("stopped process has error %v", err)
	}
	if got := LogTail(p.LogPath()); got != "ending" {
		t.Errorf("log is %q, want %q", got, "ending")
	}
	if err := p.Signal(syscall.SIGTERM); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("signalling an ended process gives %v, want %v", err, os.ErrProcessDone)
	}
}

func TestStopKillsAProcessThatIgnoresSIGTERMAndSaysSo(t *testing.T) {
	ready := filepath.Join(t.TempDir(), "ready")
	command := shell(t, `trap '' TERM; : >`+ready+`; while :; do sleep 0.05; done`)
	command.Ready = readyWhenExists(ready)
	command.StopTimeout = 200 * time.Millisecond
	p, err := StartProcess(t.Context(), command)
	if err != nil {
		t.Fatal(err)
	}
	err = p.Stop()
	if err == nil || !strings.Contains(err.Error(), "script did not end within 200ms of SIGTERM and was killed") {
		t.Errorf("got error %v, want it to tell of the kill", err)
	}
	select {
	case <-p.Exited():
	default:
		t.Error("Stop returned while the process runs")
	}
}

func TestAnUnexpectedEndIsReportedWithTheLogsTail(t *testing.T) {
	p, err := StartProcess(t.Context(), shell(t, `echo cannot go on >&2; exit 3`))
	if err != nil {
		t.Fatal(err)
	}
	var exit *ExitError
	if err := p.Wait(t.Context()); !errors.As(err, &exit) {
		t.Fatalf("got error %v, want an ExitError", err)
	}
	if exit.LogTail != "cannot go on" || !strings.Contains(exit.Error(), "exit status 3") {
		t.Errorf("got %q, want the exit status and the log's tail", exit)
	}
	if err := p.Stop(); err != nil {
		t.Errorf("Stop: %v", err)
	}
	if p.Err() == nil {
		t.Error("Stop has made the unexpected end look expected")
	}
}

func TestAProcessThatDoesNotBecomeReadyIsStopped(t *testing.T) {
	never := func(context.Context) error { return errors.New("connection refused") }
	tests := map[string]struct {
		script  string
		timeout time.Duration
		want    []string
	}{
		"because it ends": {
			script: "echo bad flag; exit 2", timeout: time.Minute,
			want: []string{"script ended unexpectedly: exit status 2", "bad flag"},
		},
		"in time": {
			script: "echo still loading; exec sleep 60", timeout: 300 * time.Millisecond,
			want: []string{"script did not become ready: not ready after 300ms", "connection refused", "still loading"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			command := shell(t, test.script)
			command.Ready, command.ReadyTimeout = never, test.timeout
			p, err := launch(command)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Kill()
			err = p.waitReady(t.Context(), command)
			for _, want := range test.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("got error %v, want %q in it", err, want)
				}
			}

			if _, err := StartProcess(t.Context(), command); err == nil {
				t.Error("StartProcess gives no error")
			}
		})
	}
}

func TestALogIsContinuedByTheNextRun(t *testing.T) {
	command := shell(t, "echo once")
	for range 2 {
		p, err := StartProcess(t.Context(), command)
		if err != nil {
			t.Fatal(err)
		}
		<-p.Exited()
	}
	if got := LogTail(command.LogFile); got != "once\nonce" {
		t.Errorf("log is %q, want both runs", got)
	}
}

func TestLogTailIsShort(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(path, []byte(strings.Repeat("line\n", 100_000)+"last\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got := strings.Split(LogTail(path), "\n")
	if len(got) != 15 || got[14] != "last" {
		t.Errorf("tail has %d lines and ends with %q", len(got), got[len(got)-1])
	}
	if got := LogTail(filepath.Join(t.TempDir(), "none")); !strings.Contains(got, "no such file") {
		t.Errorf("tail of a missing file is %q", got)
	}
}

// childMode makes the test program play a process that is killed with its
// children: see TestMain.
const childMode = "STOWAGE_LOCALCLUSTER_TEST_CHILD"

func TestMain(m *testing.M) {
	switch os.Getenv(childMode) {
	case "process":
		parentOfAProcess()
	case "cluster":
		parentOfACluster()
	case "tests":
		testProgram()
	default:
		os.Exit(m.Run())
	}
}

// parentOfAProcess starts a process from a goroutine whose thread ends, tells
// its pid and waits to be killed.
func parentOfAProcess() {
	p, err := StartProcess(context.Background(), Command{
		Name: "sleep", Path: "/bin/sleep", Args: []string{"600"}, LogFile: os.Getenv("LOG"),
	})
	if err != nil {
		panic(err)
	}
	fmt.Println(p.Pid())
	select {}
}

func TestChildrenDieWhenTheirParentIsKilled(t *testing.T) {
	parent := exec.Command(os.Args[0])
	parent.Env = append(os.Environ(), childMode+"=process", "LOG="+filepath.Join(t.TempDir(), "log"))
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 20)
	n, err := out.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	// Not the folder: where nobody reaps orphans it stays, but what has ended has no program.
	child := filepath.Join("/proc", strings.TrimSpace(string(line[:n])), "exe")
	if _, err := os.Stat(child); err != nil {
		t.Fatalf("the child does not run: %v", err)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait() // "signal: killed"
	waitFor(t, "the child to end", func() bool {
		_, err := os.Stat(child)
		return errors.Is(err, fs.ErrNotExist)
	})
}

// waitFor waits for a condition and fails the test when it does not come.
func waitFor(t *testing.T, what string, condition func() bool) {
	t.Helper()
	err := wait.PollUntilContextTimeout(context.Background(), 20*time.Millisecond, 2*time.Minute, true,
		func(context.Context) (bool, error) { return condition(), nil })
	if err != nil {
		t.Fatalf("waiting for %s: %v", what, err)
	}
}
