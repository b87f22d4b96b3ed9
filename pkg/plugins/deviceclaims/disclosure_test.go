// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/fence"
	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/auditing"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/passage"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// Whatever names claims counts those of other namespaces, unless the plugin's argument says that they may be named.
func TestClaimsOfOtherNamespacesAreCountedUnlessTheyMayBeNamed(t *testing.T) {
	foreign := func(name, device string, change ...func(*resourceapi.ResourceClaim)) *resourceapi.ResourceClaim {
		c := claim(name, append(change, allocated("node-b", device))...)
		c.Namespace = otherNamespace
		return c
	}
	attempt := func(p *v1.Pod, claims ...*resourceapi.ResourceClaim) func(t *testing.T, disclosure config.ClaimDisclosure) string {
		return func(t *testing.T, disclosure config.ClaimDisclosure) string {
			w := twoNodes()
			w.claims, w.pods = append(claims, claim("wanted", counted(2))), []*v1.Pod{p}
			h := newHarness(t, w)
			h.plugin.rivals.NameAll = disclosure == config.NameClaims
			return h.filterAll(p).message()
		}
	}
	nominated := pending("p", 5, "wanted")
	nominated.Status.NominatedNodeName = "node-b"
	lost := &fence.YieldError{
		Claim: usage.ClaimRef{Namespace: testNamespace, Name: "mine", UID: "m"},
		Verdict: tracker.Verdict{
			Outcome: tracker.Lost, Other: usage.ClaimRef{Namespace: otherNamespace, Name: "on-b-0", UID: "o"},
			Device: usage.DeviceID{Driver: testDriver, Pool: "node-b", Device: "gpu-0"},
		},
	}
	for message, tc := range map[string]struct {
		text           func(t *testing.T, disclosure config.ClaimDisclosure) string
		counted, named string
	}{
		"whose release would help": {
			text:    attempt(pod("p", "wanted"), foreign("on-b-0", "gpu-0"), foreign("on-b-1", "gpu-1")),
			counted: "if 2 claims of other namespaces were released", named: "if claims team-b/on-b-0, team-b/on-b-1 were released",
		},
		"what preemption waits for": {
			text:    attempt(nominated, foreign("on-b-0", "gpu-0", reservedFor("v")), foreign("on-b-1", "gpu-1", reservedFor("v"))),
			counted: "node node-b: 2 claims of other namespaces released, waiting for their deallocation",
			named:   "node node-b: claims team-b/on-b-0, team-b/on-b-1 released, waiting for their deallocation",
		},
		"who won a race": {
			text: func(_ *testing.T, disclosure config.ClaimDisclosure) string {
				return passage.Tell(disclosure == config.NameClaims, pod("p"), []*fence.YieldError{lost}, lost).Error()
			},
			counted: "gives way: a claim of another namespace was allocated earlier", named: "gives way: claim team-b/on-b-0 (UID o) was allocated earlier",
		},
		"who holds what was chosen by mistake": {
			text: func(t *testing.T, disclosure config.ClaimDisclosure) string {
				held := &tracker.HeldError{
					Claim:  usage.ClaimRef{Namespace: testNamespace, Name: "mine", UID: "m"},
					Device: usage.DeviceID{Driver: testDriver, Pool: "node-b", Device: "gpu-0"}, Holder: lost.Verdict.Other,
				}
				return tellHeld(t.Context(), disclosure == config.NameClaims, pod("p"), fmt.Errorf("node node-b: %w", held)).Error()
			},
			counted: "claim team-a/mine (UID m): device gpu.example.com/node-b/gpu-0 is held by a claim of another namespace", named: "is held by claim team-b/on-b-0 (UID o)",
		},
		"who holds a device, too": {
			text: func(_ *testing.T, disclosure config.ClaimDisclosure) string {
				claims := []*resourceapi.ResourceClaim{claim("mine"), foreign("on-b-0", "gpu-0"), foreign("on-b-1", "gpu-0")}
				var descriptions []string
				for _, c := range claims {
					descriptions = append(descriptions, auditing.DescribeHolder(c))
				}
				return strings.Join((&auditing.Auditor{Disclosure: disclosure}).TellOthers(claims, descriptions, 0), " ")
			},
			counted: "2 claims of other namespaces", named: "claim team-b/on-b-0 (allocated at an unknown time",
		},
	} {
		t.Run(message, func(t *testing.T) {
			for disclosure, want := range map[config.ClaimDisclosure]string{config.CountClaims: tc.counted, config.NameClaims: tc.named} {
				text := tc.text(t, disclosure)
				if !strings.Contains(text, want) {
					t.Errorf("%s: %q lacks %q", disclosure, text, want)
				}
				if names := strings.Contains(text, otherNamespace) || strings.Contains(text, "on-b-"); names != (disclosure == config.NameClaims) {
					t.Errorf("%s: %q names claims of another namespace: %t", disclosure, text, names)
				}
			}
		})
	}
	// What is not said counts.
	args := &config.DeviceClaimsArgs{}
	config.SetDefaultsDeviceClaimsArgs(args)
	if diff := cmp.Diff(config.CountClaims, args.ClaimsOfOtherNamespaces); diff != "" {
		t.Errorf("without the argument (-want +got):\n%s", diff)
	}
}
