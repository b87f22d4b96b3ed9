// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestAFreeGPUThatIsUsedIsTold: on the Node, by a metric and, by policy or for a pod, by a taint.
func TestAFreeGPUThatIsUsedIsTold(t *testing.T) {
	host := nvmlsim.Process{PID: 41, Kind: nvmlsim.ProcessCompute, Command: "python3"}
	const event = "Warning GPUUsedWithoutClaim Device " + first + ": it is used without a claim by python3 of the host"
	tests := map[string]struct {
		process nvmlsim.Process
		policy  HostProcesses
		held    *ledger.Device // by a claim of pod-1
		event   string
		of      string // the label of the metric; empty for none
		taint   string
	}{
		"a process of the host":                     {process: host, event: event, of: "host"},
		"a process of the host, which is warned of": {process: host, policy: WarnOfHostProcesses, event: event, of: "host"},
		"a process of the host, by policy":          {process: host, policy: TaintForHostProcesses, event: event, of: "host", taint: " in-use=host-process:NoSchedule"},
		"a process of a pod without a claim": {
			process: nvmlsim.Process{PID: 41, Kind: nvmlsim.ProcessCompute, Command: "train", Pod: "pod-1"},
			event:   "Warning GPUUsedWithoutClaim Device " + first + ": it is used without a claim by train of pod pod-1", of: "pod", taint: " in-use=pod:NoSchedule",
		},
		"a process without a name": {
			process: nvmlsim.Process{PID: 41, Kind: nvmlsim.ProcessCompute},
			event:   "Warning GPUUsedWithoutClaim Device " + first + ": it is used without a claim by a process of the host", of: "host",
		},
		"a pod with admin access": {
			process: nvmlsim.Process{PID: 41, Kind: nvmlsim.ProcessCompute, Command: "dcgmi", Pod: "pod-1"},
			held:    &ledger.Device{Device: first, GPU: first, AdminAccess: true},
		},
		"a process of the host on a GPU that a claim has": {process: host, policy: TaintForHostProcesses, held: &ledger.Device{Device: first, GPU: first}},
		"this agent":          {process: nvmlsim.Process{PID: uint32(os.Getpid()), Kind: nvmlsim.ProcessCompute, Command: "node-agent"}, policy: TaintForHostProcesses},
		"nvidia-persistenced": {process: nvmlsim.Process{PID: 41, Kind: nvmlsim.ProcessCompute, Command: "nvidia-persiste"}, policy: TaintForHostProcesses},
		"DCGM":                {process: nvmlsim.Process{PID: 41, Kind: nvmlsim.ProcessCompute, Command: "nv-hostengine"}, policy: TaintForHostProcesses},
		"an MPS server":       {process: nvmlsim.Process{PID: 41, Kind: nvmlsim.ProcessMPS}, policy: TaintForHostProcesses},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			_, ctx := ktesting.NewTestContext(t)
			r := newRig(t, "dgx-h100")
			agent := r.agent(ctx, newAPIServer())
			agent.opts.HostProcesses = tc.policy
			events := record.NewFakeRecorder(10)
			agent.reporter.recorder = events
			if tc.held != nil {
				entry := &ledger.Entry{Claim: ledger.Claim{UID: "held-uid", Namespace: "default", Name: "held"}, State: ledger.PrepareCompleted, Devices: []ledger.Device{*tc.held}, Pods: []types.UID{"pod-1"}}
				if err := agent.reporter.ledger.Put(entry); err != nil {
					t.Fatal(err)
				}
			}
			r.do(&nvmlsim.AddProcess{GPU: "0", Process: tc.process})
			h := agent.opts.Hardware
			// look tells whether the slices are published anew: only when a taint comes or goes.
			look := func(when string, republished bool) {
				t.Helper()
				agent.lookForForeign(ctx)
				select {
				case <-agent.publisher.changed:
					if !republished {
						t.Errorf("%s: published anew", when)
					}
				default:
					if republished {
						t.Errorf("%s: not published anew", when)
					}
				}
			}
			look("at first", tc.taint != "")
			look("what is told once is not told again", false)
			checkForeign(t, h, events, tc.event, tc.of, tc.taint)
			r.do(&nvmlsim.RemoveProcess{GPU: "0", PID: tc.process.PID})
			look("when it is gone", tc.taint != "")
			checkForeign(t, h, events, "", "", "")
		})
	}
}

func checkForeign(t *testing.T, h *Hardware, events *record.FakeRecorder, event, of, taint string) {
	t.Helper()
	var got []string
	for len(events.Events) > 0 {
		got = append(got, <-events.Events)
	}
	var want []string
	if event != "" {
		want = append(want, event)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	for _, label := range []string{"host", "pod"} {
		n, err := testutil.GetGaugeMetricValue(foreignProcesses.WithLabelValues(first, label))
		if err != nil || (n == 1) != (label == of) {
			t.Errorf("metric of %s: %v, %v", label, n, err)
		}
	}
	foreignProcesses.Reset()
	if all := published(t, h); !slices.Contains(all, first+taint) {
		t.Errorf("published %v, want %s", all, first+taint)
	}
	if use, ok := h.withheld.foreignUses()[first]; ok != (of != "") {
		t.Errorf("known are %v", fmt.Sprint(use))
	}
}

// TestAForeignUseIsToldOnceForEachUser, however often the program is started anew: each time it has another PID.
func TestAForeignUseIsToldOnceForEachUser(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	r := newRig(t, "dgx-h100")
	agent := r.agent(ctx, newAPIServer())
	events := record.NewFakeRecorder(10)
	agent.reporter.recorder = events
	var running []uint32
	for _, step := range []struct {
		name string
		runs []nvmlsim.Process
		told string // who the event names; empty for none
		says string // what the condition names
	}{
		{"one begins", []nvmlsim.Process{{PID: 41, Command: "job"}}, "job of the host", "job of the host"},
		{"it is started anew", []nvmlsim.Process{{PID: 42, Command: "job"}}, "", "job of the host"},
		{"it has two processes", []nvmlsim.Process{{PID: 43, Command: "job"}, {PID: 44, Command: "job"}}, "", "job of the host"},
		{"another one comes", []nvmlsim.Process{{PID: 43, Command: "job"}, {PID: 45, Command: "train"}}, "job of the host, train of the host", "job of the host, train of the host"},
		{"one ends", []nvmlsim.Process{{PID: 45, Command: "train"}}, "", "train of the host"},
		{"one of the same name in a pod", []nvmlsim.Process{{PID: 45, Command: "train", Pod: "pod-1"}}, "train of pod pod-1", "train of pod pod-1"},
		{"another pod", []nvmlsim.Process{{PID: 46, Command: "train", Pod: "pod-2"}}, "train of pod pod-2", "train of pod pod-2"},
		{"all end", nil, "", ""},
		{"one begins again", []nvmlsim.Process{{PID: 47, Command: "job"}}, "job of the host", "job of the host"},
	} {
		for _, pid := range running {
			r.do(&nvmlsim.RemoveProcess{GPU: "0", PID: pid})
		}
		running = nil
		for _, process := range step.runs {
			process.Kind = nvmlsim.ProcessCompute
			r.do(&nvmlsim.AddProcess{GPU: "0", Process: process})
			running = append(running, process.PID)
		}
		agent.lookForForeign(ctx)
		told := ""
		for len(events.Events) > 0 {
			told += <-events.Events
		}
		want := ""
		if step.told != "" {
			want = "Warning GPUUsedWithoutClaim Device " + first + ": it is used without a claim by " + step.told
		}
		if told != want {
			t.Errorf("%s: event %q, want %q", step.name, told, want)
		}
		if use, ok := agent.opts.Hardware.withheld.foreignUses()[first]; ok != (step.says != "") || ok && use.message() != "it is used without a claim by "+step.says {
			t.Errorf("%s: the condition says %q, want %q", step.name, use.message(), step.says)
		}
	}
}

// TestALookForForeignProcessesThatFailsIsLoud: one line of the log for each reason, however often it is tried, and a metric for as long as it
// lasts. What was known of the GPU stays.
func TestALookForForeignProcessesThatFailsIsLoud(t *testing.T) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	ctx := klog.NewContext(t.Context(), logger)
	r := newRig(t, "dgx-h100")
	agent := r.agent(ctx, newAPIServer())
	agent.opts.HostProcesses = TaintForHostProcesses
	table := &unreadableTable{Processes: agent.opts.Tools.Processes}
	agent.opts.Tools.Processes = table
	r.do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 41, Kind: nvmlsim.ProcessCompute, Command: "job"}})
	const says = "It is not known who uses the GPU"
	for _, step := range []struct {
		name  string
		err   error
		lines int // of the log, with those of the steps before
		blind float64
	}{
		{"it is known", nil, 0, 0},
		{"the table cannot be read", errors.New("no table"), 1, 1},
		{"it is tried again", errors.New("no table"), 1, 1},
		{"for another reason", errors.New("a torn table"), 2, 1},
		{"it is known again", nil, 2, 0},
		{"and is not", errors.New("a torn table"), 3, 1},
	} {
		table.err = step.err
		agent.lookForForeign(ctx)
		log := logger.GetSink().(ktesting.Underlier).GetBuffer().Data()
		var said []string
		for _, entry := range log {
			if entry.Type == ktesting.LogError && entry.Message == says {
				said = append(said, fmt.Sprint(entry.Err, entry.WithKVList, entry.ParameterKVList))
			}
		}
		if len(said) != step.lines || step.err != nil && !strings.Contains(said[len(said)-1], step.err.Error()) || step.err != nil && !strings.Contains(said[len(said)-1], first) {
			t.Errorf("%s: the log has %q, want %d lines, and the last one about %v of %s", step.name, said, step.lines, step.err, first)
		}
		if n, err := testutil.GetGaugeMetricValue(gpusOfUnknownUse); err != nil || n != step.blind {
			t.Errorf("%s: the metric is %g, %v, want %g", step.name, n, err, step.blind)
		}
		if all, want := published(t, agent.opts.Hardware), first+" in-use=host-process:NoSchedule"; !slices.Contains(all, want) {
			t.Errorf("%s: published %v, want %s", step.name, all, want)
		}
	}
	stopped, cancel := context.WithCancel(ctx)
	cancel()
	table.err = context.Canceled
	agent.lookForForeign(stopped)
	if log := logger.GetSink().(ktesting.Underlier).GetBuffer().String(); strings.Count(log, says) != 3 {
		t.Errorf("the agent's end is told as a failure:\n%s", log)
	}
}

// unreadableTable is a process table that cannot be read while err is set.
type unreadableTable struct {
	sharing.Processes
	err error
}

func (u *unreadableTable) PodOf(pid uint32) (types.UID, error) {
	if u.err != nil {
		return "", u.err
	}
	return u.Processes.PodOf(pid)
}
