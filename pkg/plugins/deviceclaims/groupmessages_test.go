// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
)

// What the pods of a group that waits are told, situation by situation: the event of the first one that found no devices.
func TestWhatAWaitingGroupIsTold(t *testing.T) {
	withGroups(t)
	onNode := func(p *v1.Pod, name string) *v1.Pod {
		p.Spec.NodeName = name
		return p
	}
	for situation, tc := range map[string]struct {
		claims  []*resourceapi.ResourceClaim
		of      []string // the group's claims
		assumed []*v1.Pod
		pods    []*v1.Pod
		want    string
	}{
		"the group's claim is allocated where a member lacks devices": {
			claims: []*resourceapi.ResourceClaim{claim("common", allocated("node-a", "gpu-0"), forGroup), claim("own")}, of: []string{"common"},
			assumed: []*v1.Pod{onNode(member(pod("sibling", "common")), "node-a")}, pods: []*v1.Pod{member(pod("p", "common", "own"))},
			want: `claim team-a/common of pod group g is allocated on node node-a: the pod can run nowhere else; request "gpu" of claim own: 1 of 1 gpu devices held`,
		},
		"devices are missing for one of the group": {
			claims: []*resourceapi.ResourceClaim{claim("own-p", counted(2)), claim("own-q", counted(2))},
			pods:   []*v1.Pod{member(pod("p", "own-p")), member(pod("q", "own-q"))},
			want:   `request "gpu" of claim own-q: 2 of 3 gpu devices held, 1 free (2 wanted on one node)`,
		},
		"the group's claim is planned for another pod of the group": {
			claims: []*resourceapi.ResourceClaim{claim("common"), claim("own", counted(2))}, of: []string{"common"},
			pods: []*v1.Pod{member(pod("p", "common")), member(pod("q", "common", "own"))},
			want: `claim team-a/common of pod group g is planned for another pod of the group on one node: the pod can run nowhere else; request "gpu" of claim own: 1 of 1 gpu devices held`,
		},
	} {
		t.Run(situation, func(t *testing.T) {
			w := twoNodes()
			w.claims, w.assumed, w.pods = tc.claims, tc.assumed, tc.pods
			w.groups = []*schedulingapi.PodGroup{group(tc.of...)}
			h := newHarness(t, w)
			g := h.tryGroup(tc.pods...)
			_, status := g.postFilter(g.fitsAll)
			var event string
			select {
			case event = <-h.recorder.Events:
			default:
			}
			if diff := cmp.Diff("Warning FailedScheduling the pod's group is waiting: "+tc.want, event); diff != "" {
				t.Errorf("event (-want +got):\n%s", diff)
			}
			if !strings.HasSuffix(status.Message(), ": "+tc.want) {
				t.Errorf("status %q, want it to end with the same", status.Message())
			}
		})
	}
}
