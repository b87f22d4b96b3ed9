// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestALinkIsJudgedByItsPortAndByWhatItWas: a card of 16 lanes in a place with 8 of them is well, and stays so until it loses one of these.
func TestALinkIsJudgedByItsPortAndByWhatItWas(t *testing.T) {
	const (
		x2 = "pcie-width=x2:NoSchedule"
		x4 = "pcie-width=x4:NoSchedule"
		x8 = "pcie-width=x8:NoSchedule"
	)
	tests := map[string]struct {
		profile string
		// bus is another link of the same card.
		bus func(*nvmlsim.Profile)
		// before and after are what the link comes down to before the agent starts, and then.
		before, after int
		// wantBefore and wantAfter are the first GPU's taint.
		wantBefore, wantAfter string
	}{
		"8 of 16 lanes below a port of 8":        {profile: "l40s", after: 4, wantAfter: x4},
		"fewer than the port from the beginning": {profile: "l40s", before: 4, wantBefore: x4, after: 4, wantAfter: x4},
		"8 of 16 lanes in a virtual machine":     {profile: "t4", after: 4, wantAfter: x4},
		"what it was there when first seen":      {profile: "t4", before: 4, after: 2, wantAfter: x2},
		"16 of 16 lanes":                         {profile: "dgx-h100", after: 8, wantAfter: x8},
		"8 of them below a port of 16":           {profile: "dgx-h100", before: 8, wantBefore: x8, after: 8, wantAfter: x8},
		"a port that a hypervisor made": {profile: "l40s", after: 4, wantAfter: x4, bus: func(p *nvmlsim.Profile) {
			p.System.VirtualMachine, p.GPU.PCIe.PortWidth = true, 16
		}},
		"a port of which the kernel does not know": {profile: "l40s", after: 4, wantAfter: x4, bus: func(p *nvmlsim.Profile) {
			p.GPU.PCIe.PortWidth = 32
		}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, tc.profile)
				if tc.bus != nil {
					profile := *r.machine.Profile()
					tc.bus(&profile)
					r.machine = nvmlsim.NewMachine(&profile, "node-1")
				}
				_, ctx := ktesting.NewTestContext(t)
				narrow := func(lanes int) {
					if lanes > 0 {
						r.do(&nvmlsim.SetPCIe{GPU: "0", Link: &nvmlsim.PCIe{Generation: r.machine.Profile().GPU.PCIe.Generation, Width: lanes}})
					}
				}
				check := func(h *Hardware, want string) {
					t.Helper()
					time.Sleep(time.Minute)
					got := published(t, h)
					plain := published(t, r.found(ctx)) // of an agent that has not asked yet: its taints are those that were kept
					if want != "" {
						want = " " + want
					}
					name := got[0][:len("gpu-0000-1b-00-0")]
					if got[0] != name+want || slices.ContainsFunc(got[1:], func(d string) bool { return len(d) != len(name) }) {
						t.Errorf("published %q, want %q on the first and nothing on the others", got, want)
					}
					if plain[0] != got[0] {
						t.Errorf("the next agent begins with %q, want %q", plain[0], got[0])
					}
				}
				narrow(tc.before)
				h := r.found(ctx)
				stop := background(ctx, h.Watch)
				check(h, tc.wantBefore)
				narrow(tc.after)
				check(h, tc.wantAfter)
				stop()
				// What it was is known after a reboot, where the link comes up as it was last.
				r.do(&nvmlsim.Reboot{})
				narrow(tc.after)
				h = r.found(ctx)
				stop = background(ctx, h.Watch)
				check(h, tc.wantAfter)
				stop()
			})
		})
	}
}
