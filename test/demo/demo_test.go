// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/internal/localcluster"
	"stowage.dev/stowage/test/lab"
)

// The demo runs every example, each once.
func TestWavesAreTheExamples(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("..", "..", "manifests", "examples", "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, file := range files {
		if name := strings.TrimSuffix(filepath.Base(file), ".yaml"); name != "kustomization" {
			want = append(want, name)
		}
	}
	if diff := cmp.Diff(want, slices.Sorted(slices.Values(slices.Concat(waves...)))); diff != "" {
		t.Errorf("examples (-manifests +waves):\n%s", diff)
	}
}

func TestPrintTable(t *testing.T) {
	differs := errors.New("GPU-2 is allocated, and not seen")
	right := lab.Row{Pod: "right", Node: "h100", Claims: []string{"one"}, Allocated: []string{"gpu-0"}, Seen: "/dev/nvidia0"}
	wrong := lab.Row{Pod: "wrong", Node: "h100", Claims: []string{"two", "three"}, Allocated: []string{"gpu-1", "gpu-2"}, Seen: "/dev/nvidia1", Err: differs}
	wide := lab.Row{Pod: "wide", Node: "b200", Claims: []string{"many"}, Seen: "/dev/nvidia0", Allocated: []string{
		"gpu-0000-1b-00-0", "gpu-0000-43-00-0", "gpu-0000-52-00-0", "gpu-0000-61-00-0",
	}}
	for name, tc := range map[string]struct {
		rows []lab.Row
		want string
		err  error
	}{
		"what is seen is what is allocated": {
			rows: []lab.Row{right},
			want: `
POD    NODE  CLAIM  ALLOCATED  SEEN IN CONTAINER
right  h100  one    gpu-0      /dev/nvidia0

`,
		},
		"one row of several is not right": {
			rows: []lab.Row{wrong, right},
			want: `
POD    NODE  CLAIM      ALLOCATED    SEEN IN CONTAINER
wrong  h100  two,three  gpu-1 gpu-2  MISMATCH /dev/nvidia1
right  h100  one        gpu-0        /dev/nvidia0

`,
			err: differs,
		},
		"a wide cell has lines": {
			rows: []lab.Row{wide},
			want: `
POD   NODE  CLAIM  ALLOCATED                                           SEEN IN CONTAINER
wide  b200  many   gpu-0000-1b-00-0 gpu-0000-43-00-0 gpu-0000-52-00-0  /dev/nvidia0
                   gpu-0000-61-00-0                                    

`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			if err := printTable(&out, tc.rows); !errors.Is(err, tc.err) || (err == nil) != (tc.err == nil) {
				t.Errorf("error %v, want %v", err, tc.err)
			} else if err != nil && !strings.Contains(err.Error(), "wrong") {
				t.Errorf("error %q does not name the pod", err)
			}
			if diff := cmp.Diff(tc.want, out.String()); diff != "" {
				t.Errorf("table (-want +got):\n%s", diff)
			}
		})
	}
}

func TestReportSaysHowItEnded(t *testing.T) {
	bad := errors.New("bad")
	for name, tc := range map[string]struct {
		err                 error
		interrupted, waited bool
		status              int
		text                string
	}{
		"all is well":           {},
		"Ctrl-C ends the lab":   {interrupted: true, waited: true},
		"Ctrl-C before the end": {err: bad, interrupted: true, status: 1, text: "\nThe demo was interrupted before its end. Everything is stopped.\n"},
		"it fails":              {err: bad, status: 1, text: "\nThe demo failed: bad\n"},
		"the lab ends and something does not stop": {err: bad, interrupted: true, waited: true, status: 1, text: "\nThe demo failed: bad\n"},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			if status := report(&out, tc.err, tc.interrupted, tc.waited); status != tc.status {
				t.Errorf("status %d, want %d", status, tc.status)
			}
			if diff := cmp.Diff(tc.text, out.String()); diff != "" {
				t.Errorf("text (-want +got):\n%s", diff)
			}
		})
	}
}

func TestExplainLabSaysWhereEverythingIs(t *testing.T) {
	var out bytes.Buffer
	explainLab(&out, places{
		kubectl: "/c/kubectl", kubeconfig: "/d/admin.kubeconfig", schedulerURL: "https://127.0.0.1:1", mapURL: "http://127.0.0.1:2/#token=t", logs: "/d/logs",
		nodes: []lab.NodePlaces{
			{Node: "a100", AgentLog: "/d/logs/a100-agent.log", StateDir: "/d/a100", SimulatorSocket: "/d/a100/sim/control.sock", AgentPID: 11},
			{
				Node: "h100", AgentLog: "/d/logs/h100-agent.log", StateDir: "/d/h100", SimulatorSocket: "/d/h100/sim/control.sock", AgentPID: 12,
				Enter: []string{"/d/janitor", "enter", "10", "/bin/sh"},
			},
		},
	})
	want := `The cluster runs until Ctrl-C, which stops and removes all of it.

kubeconfig  export KUBECONFIG=/d/admin.kubeconfig
kubectl     /c/kubectl -n demo get pods,resourceclaims -o wide
stowage     bin/kubectl-stowage gpus
            bin/kubectl-stowage why unsatisfiable -n demo
map         http://127.0.0.1:2/#token=t
scheduler   curl -k https://127.0.0.1:1/readyz?verbose
logs        /d/logs

node a100  agent          PID 11
           agent's log    /d/logs/a100-agent.log
           agent's state  /d/a100
           simulator      /d/a100/sim/control.sock

node h100  agent          PID 12
           agent's log    /d/logs/h100-agent.log
           agent's state  /d/h100
           simulator      /d/h100/sim/control.sock
           enter it       /d/janitor enter 10 /bin/sh

A fault of a simulated GPU, for instance:
  bin/nvmlsimctl --socket /d/a100/sim/control.sock gpu lose 0
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("text (-want +got):\n%s", diff)
	}
}

// README begins with the lab, says how it ends, and what is printed, as the help does.
func TestReadmeNamesTheLab(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"\nmake lab ", "Ctrl-C ends it, with status 0", "prints where " + labShows} {
		if !strings.Contains(strings.ReplaceAll(string(text), "\n", " "), strings.TrimPrefix(want, "\n")) {
			t.Errorf("README lacks %q", want)
		}
	}
}

// Programs that ended while the lab ran are no failure of it, and what could not be stopped is.
func TestWhatEndedInTheLabIsNoFailure(t *testing.T) {
	exit := &localcluster.ExitError{Name: "kubelet", Err: errors.New("signal: killed")}
	stuck := errors.New("a mount is left")
	for want, err := range map[error]error{
		nil:   fmt.Errorf("stopping node a: %w", errors.Join(exit, fmt.Errorf("stopping: %w", exit))),
		stuck: errors.Join(fmt.Errorf("stopping scheduler: %w", exit), fmt.Errorf("stopping node a: %w", errors.Join(exit, stuck))),
	} {
		if got := withoutExits(err); (got == nil) != (want == nil) || want != nil && (!errors.Is(got, want)) {
			t.Errorf("%v: %v, want %v", err, got, want)
		}
	}
}

// Nodes and examples are chosen by name, and a wrong one is named with what there is.
func TestFlagsOfTheLab(t *testing.T) {
	nodes, err := parseNodes("l40s,b=hgx-b200")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]machine{
		{name: "l40s", nvml: "sim:l40s", gpus: 8, real: true}, {name: "b", nvml: "sim:hgx-b200", gpus: 8},
	}, nodes, cmp.AllowUnexported(machine{})); diff != "" {
		t.Error(diff)
	}
	for text, want := range map[string]string{
		"h200": "h200", "a=nothing": "nothing", "h100,h100": "want a name that no other node has", "=l40s": "want a name",
	} {
		if _, err := parseNodes(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", text, err, want)
		}
	}
	if examples, err := parseExamples("one-gpu,shared-claim"); err != nil || len(examples) != 2 {
		t.Errorf("%q, %v", examples, err)
	}
	if examples, err := parseExamples("none"); err != nil || examples == nil || len(examples) != 0 {
		t.Errorf("%q, %v", examples, err)
	}
	if _, err := parseExamples("two-gpus"); err == nil || !strings.Contains(err.Error(), "two-gpus-one-pcie-root") {
		t.Errorf("error %v", err)
	}
}

// A signal ends the lab as a success, and what comes before it as a failure, as a shell sees it.
func TestASignalEndsTheLabWithStatus0(t *testing.T) {
	const waits, works = "wait", "work"
	if role := os.Getenv("DEMO_ROLE"); role != "" {
		os.Exit(untilSignal(&demo{out: os.Stdout}, func(d *demo, ctx context.Context) error {
			if role == waits {
				d.untilEnded(ctx, places{}, func(context.Context, func(*localcluster.ExitError)) {})
				return nil
			}
			fmt.Fprintln(d.out, "at work")
			<-ctx.Done()
			return ctx.Err()
		}))
	}
	for _, tc := range []struct {
		role   string
		signal os.Signal
		status int
	}{
		{waits, os.Interrupt, 0},
		{waits, syscall.SIGTERM, 0},
		{waits, syscall.SIGHUP, 0},
		{works, os.Interrupt, 1},
		{works, syscall.SIGTERM, 1},
	} {
		t.Run(fmt.Sprintf("%s, %s", tc.role, tc.signal), func(t *testing.T) {
			if signal.Ignored(tc.signal) {
				t.Skip("who started this wants it to be ignored, as nohup does")
			}
			process := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestASignalEndsTheLabWithStatus0$")
			process.Env = append(os.Environ(), "DEMO_ROLE="+tc.role)
			out, err := process.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := process.Start(); err != nil {
				t.Fatal(err)
			}
			if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
				t.Fatal(err)
			}
			if err := process.Process.Signal(tc.signal); err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, out); err != nil {
				t.Fatal(err)
			}
			_ = process.Wait() // its status is looked at
			if got := process.ProcessState.ExitCode(); got != tc.status {
				t.Errorf("exit status %d (%s), want %d", got, process.ProcessState, tc.status)
			}
		})
	}
}

func TestHelpExplainsTheLab(t *testing.T) {
	var out bytes.Buffer
	set := flag.NewFlagSet("demo", flag.ContinueOnError)
	set.SetOutput(&out)
	flags(&demo{}, set)
	set.Usage()
	for _, want := range []string{
		"run `make build` first, or `make demo`", "Exit status: 0 if everything was as it should be, also when -lab is ended by Ctrl-C; 1 otherwise.",
		"keep the cluster up until Ctrl-C, and print where " + labShows,
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("help lacks %q:\n%s", want, out.String())
		}
	}
}
