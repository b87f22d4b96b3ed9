// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestWhatATenantIsToldNamesNoOther: whatever of another namespace is in the way of a claim, the error, which becomes the kubelet's event and
// the claim's condition, has neither claim nor pod, namespace nor UID of that one. The log has them. To the same namespace it is told.
func TestWhatATenantIsToldNamesNoOther(t *testing.T) {
	const secret, pod = "team-secret", "5ecre7-9od-uid"
	theirs := func() *resourceapi.ResourceClaim { return reservedFor(of(secret, claim("hidden", "gpu="+gpu0)), pod) }
	ours := func() *resourceapi.ResourceClaim { return of("team-a", claim("train", "gpu="+gpu0)) }
	tests := map[string]struct {
		before func(n *node, m *prepare.Manager)
		claim  *resourceapi.ResourceClaim
		says   string
		log    string
		// same: to a claim of the other namespace it says so.
		same string
	}{
		"it has the GPU": {
			before: func(n *node, m *prepare.Manager) { n.prepared(m, theirs()) },
			says:   "is still held on this node by a claim of another namespace", log: secret + "/hidden", same: secret + "/hidden",
		},
		"its record cannot be read": {
			before: func(n *node, m *prepare.Manager) { n.prepared(m, theirs()); n.tear("hidden-uid") },
			says:   "by a claim whose ledger record cannot be read", log: "hidden-uid", same: "by a claim whose ledger record cannot be read",
		},
		"its process does not end": {
			before: func(n *node, m *prepare.Manager) {
				n.prepared(m, theirs())
				n.do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 4711, Kind: nvmlsim.ProcessCompute, Pod: pod, Stuck: true}})
				n.unprepare(m, "hidden-uid")
			},
			says: "is in quarantine since", log: pod, same: pod,
		},
		"its quarantine cannot be read": {
			before: func(n *node, _ *prepare.Manager) {
				if err := os.WriteFile(filepath.Join(n.root, "state", "quarantine", gpu0+"_hidden-uid.quarantine"), []byte("{"), 0o600); err != nil {
					n.t.Fatal(err)
				}
			},
			says: "is in quarantine since", log: "hidden-uid", same: "is in quarantine since",
		},
		"its process is there without a claim": {
			before: func(n *node, _ *prepare.Manager) {
				n.do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 4711, Kind: nvmlsim.ProcessCompute, Pod: pod}})
			},
			says: "is in use by a process of another pod", log: "process 4711 of pod " + pod, same: "is in use by a process of another pod",
		},
		"it has too large a share": {
			before: func(n *node, m *prepare.Manager) { n.prepared(m, of(secret, sharedBy("hidden", "60Gi:5", ""))) },
			claim:  of("team-a", sharedBy("train", "60Gi:5", "")),
			says:   "the shares that are held on this node by a claim of another namespace", log: secret + "/hidden",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			n.rules.AcrossNamespaces = true
			n.options.Leftovers = prepare.QuarantineLeftovers // it is not waited for
			m := n.manager()
			tc.before(n, m)
			c := tc.claim
			if c == nil {
				c = ours()
			}
			_, err := m.Prepare(n.ctx, c)
			if err == nil || !strings.Contains(err.Error(), tc.says) {
				t.Fatalf("error %v, want one that says %q", err, tc.says)
			}
			for _, word := range []string{secret, "hidden", pod, "4711"} {
				if strings.Contains(err.Error(), word) {
					t.Errorf("error %q has %q, which is another namespace's", err, word)
				}
			}
			if log := strings.Join(prepare.Others(err), ", "); !strings.Contains(log, tc.log) {
				t.Errorf("the log has %q, want %q in it", log, tc.log)
			}
			if tc.same == "" {
				return
			}
			if _, err := m.Prepare(n.ctx, of(secret, claim("next", "gpu="+gpu0))); err == nil || !strings.Contains(err.Error(), tc.same) {
				t.Errorf("to its own namespace: %v, want %q", err, tc.same)
			}
		})
	}
}
