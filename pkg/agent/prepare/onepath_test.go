// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"errors"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/hold"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
)

// TestSharesAreOfOnePath: a replica that a pod has from the device plugin is not held beside the share of a claim, whichever came first. Two of one
// path are.
func TestSharesAreOfOnePath(t *testing.T) {
	replica := func(id string) *resourceapi.ResourceClaim {
		of := ledger.PluginDevice{Resource: "nvidia.com/gpu.shared", ID: id}
		return hold.Claim(driverName, pool, of, gpu0, &ledger.Share{MemoryBytes: 8 << 30, ComputePercent: 10}, []types.UID{types.UID("pod of " + id)})
	}
	claims, replicas := [2]*resourceapi.ResourceClaim{sharedBy("one", "8Gi:10", ""), sharedBy("two", "8Gi:10", "")}, [2]*resourceapi.ResourceClaim{replica("a"), replica("b")}
	for name, tc := range map[string]struct {
		first  [2]*resourceapi.ResourceClaim
		second *resourceapi.ResourceClaim
	}{
		"a replica after claims": {claims, replicas[0]},
		"a claim after replicas": {replicas, claims[0]},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.rules.AcrossNamespaces = true
			m := n.manager()
			for _, c := range tc.first {
				n.prepared(m, c)
			}
			var held *prepare.HeldError
			if _, err := m.Prepare(n.ctx, tc.second); !errors.As(err, &held) {
				t.Errorf("error %v, want that another path has the GPU", err)
			}
			for _, c := range tc.first {
				n.unprepare(m, c.UID)
			}
			n.prepared(m, tc.second)
		})
	}
}

// TestTheNextPodIsNotNotedBeforeItStarts: what the one before has left on the device is looked for as long as the record has that one alone.
func TestTheNextPodIsNotNotedBeforeItStarts(t *testing.T) {
	device := func(pods ...types.UID) *resourceapi.ResourceClaim {
		return hold.Claim(driverName, pool, ledger.PluginDevice{Resource: "nvidia.com/gpu", ID: "GPU-1"}, gpu0, nil, pods)
	}
	for name, tc := range map[string]struct{ had, noted, want []types.UID }{
		"nobody had it":        {nil, []types.UID{"one"}, []types.UID{"one"}},
		"another one had it":   {[]types.UID{"one"}, []types.UID{"two"}, []types.UID{"one"}},
		"it had it":            {[]types.UID{"one"}, []types.UID{"one"}, []types.UID{"one"}},
		"the kubelet has both": {[]types.UID{"one"}, []types.UID{"one", "two"}, []types.UID{"one", "two"}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			m := n.manager()
			n.prepared(m, device(tc.had...))
			if err := m.NotePods(n.ctx, device(tc.noted...)); err != nil {
				t.Fatal(err)
			}
			if _, record := n.recordOf(device().UID); !slices.Equal(record.Entry.Pods, tc.want) {
				t.Errorf("record of the pods %v, want %v", record.Entry.Pods, tc.want)
			}
		})
	}
}
