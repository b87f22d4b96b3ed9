// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/simulate"
	"stowage.dev/stowage/pkg/snapshot"
)

// What is proposed would help: neither devices where CPU is missing, nor a node where a selector fails, nor a node more where one of the
// cluster's own is tainted.
func TestAdvice(t *testing.T) {
	missing := func() *explain.Explanation {
		return &explain.Explanation{Nodes: 2, Requests: []explain.Request{{
			Request: "gpu", DeviceClass: "gpus", Devices: 8, Limit: &explain.Limit{Asked: 1},
			FilteredBy: []explain.SelectorCount{{Expression: "false", Devices: 8}},
		}}}
	}
	for name, tc := range map[string]struct {
		out  simulate.Outcome
		want []string
	}{
		"devices alone": {
			simulate.Outcome{Explanation: missing()},
			[]string{
				"Request gpu: no node has a device that matches it: add a node with 1.",
				"Request gpu: relax the selector false, which rejects 8 of 8 devices of class gpus.",
			},
		},
		"CPU on all nodes": {
			simulate.Outcome{Explanation: missing(), EvenEmpty: []simulate.Refusal{{Reason: "Insufficient cpu", Nodes: []string{"a", "b"}}}},
			[]string{"Devices are not all that is missing on a, b. Even if nobody were there: Insufficient cpu."},
		},
		"a taint on another node": {
			simulate.Outcome{Explanation: missing(), Others: []simulate.Refusal{{Reason: "untolerated taint", Nodes: []string{"c"}}}},
			[]string{
				"Nodes with devices refuse it for another reason: untolerated taint (c).",
				"Request gpu: no other node has a device that matches it: add a node with 1.",
				"Request gpu: relax the selector false, which rejects 8 of 8 devices of class gpus.",
			},
		},
		"a selector that fails": {
			simulate.Outcome{Explanation: &explain.Explanation{Nodes: 2, SelectorErrors: []explain.SelectorError{
				{Request: "gpu", Expression: "device.nope", Device: "gpu-0"}, {Request: "gpu", Expression: "device.nope", Device: "gpu-1"},
			}}},
			[]string{"Request gpu: mend the selector device.nope, which fails on devices."},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, advise(&tc.out)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// The standard input is one thing: manifests behind a snapshot would be read as none.
func TestStandardInputIsReadOnce(t *testing.T) {
	var errOut bytes.Buffer
	streams := genericiooptions.IOStreams{In: strings.NewReader(""), Out: io.Discard, ErrOut: &errOut}
	if got := run(t.Context(), []string{"whatif", "-f", "-", "--snapshot", "-"}, streams); got != exitUsage {
		t.Errorf("exit code %d, want %d: %s", got, exitUsage, errOut.String())
	}
}

// Of a pod whose containers do not run it is said if devices are not the reason.
func TestReadyDevicesAreNotTheReason(t *testing.T) {
	for ready, want := range map[string]bool{"True": true, "False": false, "": false} {
		var out bytes.Buffer
		c := &cli{IOStreams: genericiooptions.IOStreams{Out: &out}}
		why := &simulate.Why{Namespace: "a", Pod: "b", State: simulate.Preparing, Node: "n", Claims: []simulate.ClaimStatus{
			{Name: "one", Devices: []simulate.DeviceStatus{{Ready: "True"}}}, {Name: "two", Devices: []simulate.DeviceStatus{{Ready: ready}}},
		}}
		if err := c.printWhy(snapshot.New(snapshot.Objects{}), why); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(out.String(), "Its devices are ready"); got != want {
			t.Errorf("ready %q: it prints\n%s", ready, out.String())
		}
	}
}
