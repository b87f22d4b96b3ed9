// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// TestATextNamesClaimsOfItsNamespaceOnly: the error is for the claim's namespace, and the log has what it leaves out.
func TestATextNamesClaimsOfItsNamespaceOnly(t *testing.T) {
	mine := ledger.Claim{UID: "m", Namespace: "team-a", Name: "mine"}
	near := ledger.Claim{UID: "n", Namespace: "team-a", Name: "near"}
	nigh := ledger.Claim{UID: "i", Namespace: "team-a", Name: "nigh"}
	far := ledger.Claim{UID: "f", Namespace: "team-b", Name: "far"}
	away := ledger.Claim{UID: "w", Namespace: "team-c", Name: "away"}
	plugin := ledger.Claim{UID: "p", Name: "nvidia.com.gpu.gpu-0", Plugin: ledger.PluginDevice{Resource: "nvidia.com/gpu", ID: "gpu-0"}}
	runs := func(pod string) Use {
		return Use{Text: "used by pod " + pod + ", which runs", Public: "used by its pod, which runs"}
	}
	ends := func(pod string) Use {
		const text = "which is being released: %s has ended"
		return Use{Ends: true, Text: fmt.Sprintf(text, "pod "+pod), Public: fmt.Sprintf(text, "its pod")}
	}
	held := func(by ledger.Claim, use Use) error {
		return &HeldError{Claim: mine, Request: "r", Device: "gpu-0", Holder: by, Use: use}
	}
	share := func(holder ledger.Claim, use Use, others ...ledger.Claim) error {
		return &ShareError{Claim: mine, Request: "r", Device: "gpu-0", Capacity: "memory", Taken: "90Gi", Total: "80Gi", Others: others, Holder: holder, Use: use}
	}
	quarantined := func(refused, owed ledger.Claim) error {
		const reason = "process 7 of pod p-1 is still on it"
		return &QuarantinedError{
			GPU: "gpu-0", Reason: reason, Since: time.Date(2026, 11, 23, 1, 0, 0, 0, time.UTC), Owed: owed, Claim: refused,
			Err: errors.New("undo Processes GPU-1: " + reason),
		}
	}
	const (
		what = "claim team-a/mine (m), request r: device gpu-0 "
		full = "claim team-a/mine (m), request r: device gpu-0: its share is more than is left: 90Gi of the 80Gi memory would be taken, with the shares that are held on this node by "
	)
	tests := map[string]struct {
		err    error
		text   string
		others []string
	}{
		"held in its namespace": {
			held(near, runs("team-a/p")), what + "is still held on this node by claim team-a/near (n), used by pod team-a/p, which runs",
			[]string{"team-a/near (n), used by pod team-a/p, which runs"},
		},
		"held in another one": {
			held(far, runs("team-b/p")), what + "is still held on this node by a claim of another namespace, used by its pod, which runs",
			[]string{"team-b/far (f), used by pod team-b/p, which runs"},
		},
		"released in its namespace": {
			held(near, ends("team-a/p")), what + "waits for claim team-a/near (n), which is being released: pod team-a/p has ended",
			[]string{"team-a/near (n), which is being released: pod team-a/p has ended"},
		},
		"released in another one": {
			held(far, ends("team-b/p")), what + "waits for a claim of another namespace, which is being released: its pod has ended",
			[]string{"team-b/far (f), which is being released: pod team-b/p has ended"},
		},
		"held in another one, by whom is not known": {
			held(far, Use{}), what + "is still held on this node by a claim of another namespace", []string{"team-b/far (f)"},
		},
		"held by what cannot be read": {
			&HeldError{Claim: mine, Request: "r", Device: "gpu-0", Holder: ledger.Claim{UID: "f"}, Unreadable: errors.New("torn")},
			what + "is still held on this node by a claim whose ledger record cannot be read; node-agent ledger show names it, on the node",
			[]string{"f: torn"},
		},
		"shared in its namespace": {
			share(ledger.Claim{}, Use{}, near, nigh), full + "claims team-a/near (n), team-a/nigh (i)", []string{"team-a/near (n)", "team-a/nigh (i)"},
		},
		"shared in both": {share(ledger.Claim{}, Use{}, near, far), full + "claim team-a/near (n) and a claim of another namespace", []string{"team-a/near (n)", "team-b/far (f)"}},
		"shared in other ones": {
			share(far, ends("team-b/p"), away, far), full + "2 claims of other namespaces; it waits for a claim of another namespace, which is being released: its pod has ended",
			[]string{"team-c/away (w)", "team-b/far (f), which is being released: pod team-b/p has ended"},
		},
		"shared with nobody": {share(ledger.Claim{}, Use{}), full + "nobody else", nil},
		"set up in another one": {
			&ShareError{Claim: mine, Request: "r", Device: "gpu-0", Setup: "MPS", Wants: "TimeSlicing (Default)", Others: []ledger.Claim{far}},
			"claim team-a/mine (m), request r: device gpu-0: the node shares its GPUs by TimeSlicing (Default), and this one is still shared by MPS, by a claim of another namespace",
			[]string{"team-b/far (f)"},
		},
		"shared with another one": {
			&ShareError{Claim: mine, Request: "r", Device: "gpu-0", Apart: "node-1", Others: []ledger.Claim{far}},
			"claim team-a/mine (m), request r: device gpu-0: node node-1 gives shares of a GPU to one namespace alone (it is run without --share-across-namespaces), and a claim of another namespace has one",
			[]string{"team-b/far (f)"},
		},
		"in quarantine, for the administrator": {
			quarantined(ledger.Claim{}, far), "GPU gpu-0 is in quarantine since 2026-11-23T01:00:00Z (process 7 of pod p-1 is still on it): undo Processes GPU-1: process 7 of pod p-1 is still on it",
			[]string{"team-b/far (f)", "GPU gpu-0 is in quarantine since 2026-11-23T01:00:00Z (process 7 of pod p-1 is still on it): undo Processes GPU-1: process 7 of pod p-1 is still on it"},
		},
		"shared with its namespace, and by the device plugin": {
			share(ledger.Claim{}, Use{}, near, plugin), full + "claim team-a/near (n) and a pod that has it by the device plugin",
			[]string{"team-a/near (n)", "nvidia.com/gpu gpu-0 of the device plugin"},
		},
		"in quarantine because of its namespace": {
			quarantined(mine, near), "GPU gpu-0 is in quarantine since 2026-11-23T01:00:00Z (process 7 of pod p-1 is still on it): undo Processes GPU-1: process 7 of pod p-1 is still on it",
			[]string{"team-a/near (n)", "GPU gpu-0 is in quarantine since 2026-11-23T01:00:00Z (process 7 of pod p-1 is still on it): undo Processes GPU-1: process 7 of pod p-1 is still on it"},
		},
		"in quarantine because of another one": {
			quarantined(mine, far), "GPU gpu-0 is in quarantine since 2026-11-23T01:00:00Z: what an earlier claim did to it is not undone; node-agent ledger show says more, on the node",
			[]string{"team-b/far (f)", "GPU gpu-0 is in quarantine since 2026-11-23T01:00:00Z (process 7 of pod p-1 is still on it): undo Processes GPU-1: process 7 of pod p-1 is still on it"},
		},
		"in quarantine, for whom is not known": {
			quarantined(mine, ledger.Claim{}), "GPU gpu-0 is in quarantine since 2026-11-23T01:00:00Z: what an earlier claim did to it is not undone; node-agent ledger show says more, on the node",
			[]string{"GPU gpu-0 is in quarantine since 2026-11-23T01:00:00Z (process 7 of pod p-1 is still on it): undo Processes GPU-1: process 7 of pod p-1 is still on it"},
		},
		"used without a claim": {
			&BusyError{Claim: mine, GPU: "gpu-0", PID: 7, Pod: "p-1"}, "claim team-a/mine (m): GPU gpu-0 is in use by a process of another pod, which has no claim for it on this node",
			[]string{"process 7 of pod p-1"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.text, tc.err.Error()); diff != "" {
				t.Errorf("text (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.others, Others(fmt.Errorf("x: %w", tc.err))); diff != "" {
				t.Errorf("for the log (-want +got):\n%s", diff)
			}
		})
	}
}
