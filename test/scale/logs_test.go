// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestOnlyStartAndDecisionsMayBeInTheLog(t *testing.T) {
	planted := &plant{device: "gpu.nvidia.com/node-0095/gpu-0000-10-00-0"}
	const (
		start    = `I1122 21:45:24.195430   22474 leaderelection.go:272] "Successfully acquired lease" lock="stowage-system/stowage-scheduler"`
		decision = `I1122 21:45:25.005430   22474 decisions.go:43] "Allocated devices" claim="team-01/a" pod="team-01/b" node="node-0001"`
		unquoted = `I1122 21:45:23.791307   22474 secure_serving.go:214] Serving securely on 127.0.0.1:44575`
		held     = `E1122 21:45:49.169248   22474 auditor.go:185] "Device is held by more than one claim" logger="auditor" device=`
		found    = held + `"gpu.nvidia.com/node-0095/gpu-0000-10-00-0"`
		other    = held + `"gpu.nvidia.com/node-0001/gpu-0000-10-00-0"`
		warning  = `W1122 21:45:24.186169   22474 reflector.go:600] "Successfully acquired lease"`
		slow     = `I1122 21:45:24.186169   22474 request.go:752] "Waited before sending request" delay="1.2s" verb="GET"`
		trace    = "goroutine 1 [running]:"
	)
	tests := map[string]struct {
		lines   []string
		planted *plant
		want    []string
	}{
		"what a scheduler starts with":          {lines: []string{start, unquoted}},
		"what it decides":                       {lines: []string{start, decision}},
		"the device that was planted":           {lines: []string{found}, planted: planted},
		"a device that nobody planted":          {lines: []string{other}, planted: planted, want: []string{other}},
		"a finding before anything was planted": {lines: []string{found}, want: []string{found}},
		"a known message that is now a warning": {lines: []string{start, warning}, want: []string{warning}},
		"a request that waited":                 {lines: []string{slow, start}, want: []string{slow}},
		"a stack trace":                         {lines: []string{start, trace, "", "\t/src/main.go:1"}, want: []string{trace, "\t/src/main.go:1"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got := strangeLines(strings.Join(test.lines, "\n")+"\n", test.planted)
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("strange lines (-want +got):\n%s", diff)
			}
		})
	}
	for _, one := range known {
		if one.message == "" || one.why == "" || !strings.Contains("IWE", one.severity) {
			t.Errorf("%+v knows too much", one)
		}
	}
}
