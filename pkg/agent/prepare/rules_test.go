// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// of gives the claim to a namespace.
func of(namespace string, c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	c.Namespace = namespace
	return c
}

// fromClaim makes the claim's parameters its own; without it they are its class's.
func fromClaim(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	for i := range c.Status.Allocation.Devices.Config {
		c.Status.Allocation.Devices.Config[i].Source = resourceapi.AllocationConfigSourceClaim
	}
	return c
}

// TestNoTenantDecidesHowAGPUIsShared: what a claim asks for its share of a GPU is the node's to decide. Nothing is touched for it, and the
// next tenant, who asks for nothing, gets its share of a GPU that is set up as the node says.
func TestNoTenantDecidesHowAGPUIsShared(t *testing.T) {
	exclusive, medium := sharingConfig("GpuConfig", "Exclusive", ""), sharingConfig("GpuConfig", "TimeSlicing", `,"timeSlicingConfig":{"interval":"Medium"}`)
	slicing := sharingConfig("GpuConfig", "TimeSlicing", "")
	const from = "claim team-a/greedy (greedy-uid), request gpu, device " + gpu0 + ": status.allocation.devices.config[0].opaque.parameters (from the "
	tests := map[string]struct {
		shares config.Strategy
		first  *resourceapi.ResourceClaim
		want   []string // none: the claim is prepared
		// setup of the GPU when both are there.
		setup setting
	}{
		"alone": {
			first: fromClaim(sharedBy("greedy", "20Gi:5", exclusive)),
			want:  []string{from + `claim): sharing.strategy: "Exclusive": `},
			setup: setting{Compute: nvmlsim.ComputeDefault},
		},
		"alone, by its class": {
			first: sharedBy("greedy", "20Gi:5", exclusive),
			want:  []string{from + `class): sharing.strategy: "Exclusive": `},
			setup: setting{Compute: nvmlsim.ComputeDefault},
		},
		"alone, under MPS": {
			shares: config.MPS, first: sharedBy("greedy", "20Gi:5", exclusive),
			want:  []string{`sharing.strategy: "Exclusive": `},
			setup: setting{Compute: nvmlsim.ComputeExclusiveProcess, Daemons: []nvmlsim.Daemon{{Name: gpu0, GPUs: []string{"GPU"}, MultiUser: true}}},
		},
		"longer time slices": {
			first: fromClaim(sharedBy("greedy", "20Gi:5", medium)),
			want:  []string{from + `claim): sharing.timeSlicingConfig.interval: "Medium": `, "want Default"},
			setup: setting{Compute: nvmlsim.ComputeDefault},
		},
		"MPS on a node of time slices": {
			first: fromClaim(sharedBy("greedy", "20Gi:5", underMPS)),
			want:  []string{from + `claim): sharing.strategy: "MPS": node node-1 shares its GPUs by TimeSlicing (--share-strategy=time-slicing)`, "attribute sharingStrategies"},
			setup: setting{Compute: nvmlsim.ComputeDefault},
		},
		"time slices on a node of MPS": {
			shares: config.MPS, first: sharedBy("greedy", "20Gi:5", slicing),
			want:  []string{`sharing.strategy: "TimeSlicing": node node-1 shares its GPUs by MPS (--share-strategy=mps)`},
			setup: setting{Compute: nvmlsim.ComputeExclusiveProcess, Daemons: []nvmlsim.Daemon{{Name: gpu0, GPUs: []string{"GPU"}, MultiUser: true}}},
		},
		"the second of two requests": {
			first: func() *resourceapi.ResourceClaim {
				c := withConfig(claim("greedy", "a="+gpu0+"+share:a:4Gi:10", "b="+gpu0+"+share:b:1Gi:5"), driverName, exclusive)
				c.Status.Allocation.Devices.Config[0].Requests = []string{"b"}
				return c
			}(),
			want:  []string{"claim team-a/greedy (greedy-uid), request b, device " + gpu0, `sharing.strategy: "Exclusive"`},
			setup: setting{Compute: nvmlsim.ComputeDefault},
		},
		"what the node does": {first: sharedBy("greedy", "20Gi:5", slicing), setup: setting{Compute: nvmlsim.ComputeDefault}},
		"what the node does, under MPS, and limits of its own": {
			shares: config.MPS, first: sharedBy("greedy", "20Gi:5", sharingConfig("GpuConfig", "MPS", `,"mpsConfig":{"defaultPinnedDeviceMemoryLimit":"2Gi"}`)),
			setup: setting{Compute: nvmlsim.ComputeExclusiveProcess, Daemons: []nvmlsim.Daemon{{Name: gpu0, GPUs: []string{"GPU"}, MultiUser: true}}},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			n.rules.Shares, n.rules.AcrossNamespaces = tc.shares, true
			m := n.manager()
			before := n.state()
			_, err := m.Prepare(n.ctx, of("team-a", tc.first))
			if len(tc.want) == 0 && err != nil {
				t.Fatal(err)
			}
			var refused *config.Error
			if len(tc.want) > 0 {
				if !errors.As(err, &refused) {
					t.Fatalf("error %v (%T), want that the parameters are refused", err, err)
				}
				if diff := cmp.Diff(before, n.state(), cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("something was touched (-before +after):\n%s", diff)
				}
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
			n.prepared(m, of("team-b", sharedBy("modest", "20Gi:25", "")))
			if diff := cmp.Diff(tc.setup, n.setting(0), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("setting for the other tenant (-want +got):\n%s", diff)
			}
		})
	}
}

// TestAnAdministratorSaysHowClaimsShare: on GPUs and MIG devices that a claim has to itself.
func TestAnAdministratorSaysHowClaimsShare(t *testing.T) {
	whole := func(parameters string) *resourceapi.ResourceClaim {
		return withConfig(claim("train", "gpu="+gpu0), driverName, parameters)
	}
	mig := func(strategy string) *resourceapi.ResourceClaim {
		return withConfig(claim("train", "gpu="+gpu0+"-mig-1g10gb-0"), driverName, sharingConfig("MigDeviceConfig", strategy, ""))
	}
	const slicing, mps = config.TimeSlicing, config.MPS
	tests := map[string]struct {
		allowed []config.Strategy
		claim   *resourceapi.ResourceClaim
		want    string // empty: the claim is prepared
	}{
		"MPS, which is allowed":              {allowed: []config.Strategy{mps}, claim: whole(underMPS)},
		"MPS, where time slices are":         {allowed: []config.Strategy{slicing}, claim: whole(underMPS), want: `sharing.strategy: "MPS": node node-1 does not allow it (--allow-sharing=time-slicing)`},
		"MPS of a MIG device":                {allowed: []config.Strategy{slicing}, claim: mig("MPS"), want: `sharing.strategy: "MPS": node node-1 does not allow it (--allow-sharing=time-slicing)`},
		"time slices, which are allowed":     {allowed: []config.Strategy{slicing, mps}, claim: whole(sharingConfig("GpuConfig", "TimeSlicing", `,"timeSlicingConfig":{"interval":"Long"}`))},
		"time slices, where nothing is":      {claim: whole(sharingConfig("GpuConfig", "TimeSlicing", "")), want: `sharing.strategy: "TimeSlicing": node node-1 does not allow it (--allow-sharing=none)`},
		"time slices of a MIG device":        {allowed: []config.Strategy{mps}, claim: mig("TimeSlicing"), want: `"TimeSlicing": node node-1 does not allow it (--allow-sharing=mps)`},
		"the GPU alone, where nothing is":    {claim: whole(sharingConfig("GpuConfig", "Exclusive", ""))},
		"nothing, where nothing is":          {claim: claim("train", "gpu="+gpu0)},
		"MPS with admin access, to no avail": {claim: withConfig(claim("train", "gpu="+gpu0+"+admin"), driverName, underMPS)},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			n.rules.Allowed = tc.allowed
			before := n.state()
			m := n.manager()
			_, err := m.Prepare(n.ctx, tc.claim)
			var refused *config.Error
			switch {
			case tc.want == "" && err != nil:
				t.Fatal(err)
			case tc.want == "":
				return
			case !errors.As(err, &refused) || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "request gpu, device "+gpu0):
				t.Errorf("error %v (%T), want a refusal that says %q", err, err, tc.want)
			}
			if diff := cmp.Diff(before.GPUs, n.state().GPUs, cmpopts.EquateEmpty()); diff != "" || len(n.files()) > 0 {
				t.Errorf("something was touched (-before +after), files %v:\n%s", n.files(), diff)
			}
		})
	}
}

// TestRulesOfTheNodeAreForClaimsToCome: the kubelet asks again for one that is prepared when it starts, and whoever changed a flag meanwhile
// does not end its pod.
func TestRulesOfTheNodeAreForClaimsToCome(t *testing.T) {
	plain := func() *resourceapi.ResourceClaim { return sharedBy("plain", "20Gi:25", "") }
	explicit := func() *resourceapi.ResourceClaim { return sharedBy("explicit", "20Gi:25", underMPS) }
	alone := func() *resourceapi.ResourceClaim {
		return withConfig(claim("alone", "gpu="+gpu1), driverName, underMPS)
	}
	n := newNodeOf(t, twoGPUs)
	n.rules.Shares, n.rules.AcrossNamespaces = config.MPS, true
	m := n.manager()
	far := func() *resourceapi.ResourceClaim { return of("team-b", sharedBy("far", "10Gi:5", "")) }
	all := []func() *resourceapi.ResourceClaim{plain, explicit, alone, far}
	for _, c := range all {
		n.prepared(m, c())
	}
	before := n.state()

	n.rules = config.Rules{Node: pool, Allowed: []config.Strategy{config.TimeSlicing}, Shares: config.TimeSlicing}
	m = n.manager()
	for _, c := range all {
		if env := n.env(n.prepared(m, c())); !slices.Contains(env, "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps") {
			t.Errorf("environment %v of %s, want that of MPS", env, c().Name)
		}
	}
	if diff := cmp.Diff(before, n.state(), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("what was prepared (-before +now):\n%s", diff)
	}
	// What comes waits until the last of them has gone.
	next := sharedBy("next", "5Gi:5", "")
	for _, c := range []func() *resourceapi.ResourceClaim{far, explicit, plain} {
		var share *prepare.ShareError
		if _, err := m.Prepare(n.ctx, next); !errors.As(err, &share) {
			t.Fatalf("a claim of today beside those of yesterday: %v", err)
		}
		n.unprepare(m, c().UID)
	}
	n.prepared(m, next)
	if got := n.setting(0).Compute; got != nvmlsim.ComputeDefault {
		t.Errorf("compute mode %s for time slices", got)
	}
}

// TestSharesOfAGPUAreOneNamespaces, unless the administrator says otherwise.
func TestSharesOfAGPUAreOneNamespaces(t *testing.T) {
	for name, across := range map[string]bool{"apart": false, "across namespaces": true} {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			n.rules.AcrossNamespaces = across
			m := n.manager()
			n.prepared(m, of("team-a", sharedBy("one", "20Gi:25", "")))
			n.prepared(m, of("team-a", sharedBy("two", "20Gi:25", "")))
			far := of("team-b", sharedBy("far", "20Gi:25", ""))
			before := n.state()
			_, err := m.Prepare(n.ctx, far)
			if across {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			var share *prepare.ShareError
			if !errors.As(err, &share) || !strings.Contains(err.Error(), "node node-1 gives shares of a GPU to one namespace alone (it is run without --share-across-namespaces)") ||
				strings.Contains(err.Error(), "team-a") {
				t.Errorf("error %v, want one that names node and flag, and nobody", err)
			}
			if diff := cmp.Diff(before, n.state(), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("something was touched (-before +after):\n%s", diff)
			}
			n.unprepare(m, "one-uid")
			n.unprepare(m, "two-uid")
			n.prepared(m, far)
		})
	}
}

// TestRulesOfTheNodeAreForClaimsThatArePreparedAnew: what a claim had before a reboot is on no GPU any more. Allocated another one, it has no more rights
// to it than a claim that was never here.
func TestRulesOfTheNodeAreForClaimsThatArePreparedAnew(t *testing.T) {
	tests := map[string]struct {
		before, after config.Strategy
		other         string // namespace of who has a share of the GPU by now; nobody if empty
		want          string // empty: the claim is prepared
	}{
		"another namespace has the GPU": {before: config.TimeSlicing, after: config.TimeSlicing, other: "team-b", want: "shares of a GPU to one namespace alone"},
		"its own has":                   {before: config.MPS, after: config.TimeSlicing, other: "team-a"},
		"its own has, under MPS":        {before: config.TimeSlicing, after: config.MPS, other: "team-a"},
		"the node shares otherwise":     {before: config.MPS, after: config.TimeSlicing},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNodeOf(t, twoGPUs)
			n.rules.Shares = tc.before
			n.prepared(n.manager(), of("team-a", claim("moved", "gpu="+gpu1+"+share:s:20Gi:25")))
			n.rules.Shares = tc.after
			n.do(&nvmlsim.Reboot{})
			n.hardware.discover(t, dynamic)
			m := n.manager()
			if tc.other != "" {
				n.prepared(m, of(tc.other, sharedBy("other", "20Gi:25", "")))
			}
			_, err := m.Prepare(n.ctx, of("team-a", claim("moved", "gpu="+gpu0+"+share:s:20Gi:25")))
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
			want := setting{Compute: nvmlsim.ComputeDefault}
			if tc.after == config.MPS {
				want = setting{Compute: nvmlsim.ComputeExclusiveProcess, Daemons: []nvmlsim.Daemon{{Name: gpu0, GPUs: []string{"GPU"}, MultiUser: true}}}
			}
			if diff := cmp.Diff(want, n.setting(0), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("setting of the GPU (-want +got):\n%s", diff)
			}
		})
	}
}

// TestSharesOfAClaimOfAnOlderAgent may be used in several ways: each claim said for itself how, then.
func TestSharesOfAClaimOfAnOlderAgent(t *testing.T) {
	mixed := func() *resourceapi.ResourceClaim {
		return claim("mixed", "a="+gpu0+"+share:a:4Gi:10", "b="+gpu1+"+share:b:4Gi:10")
	}
	n := newNodeOf(t, twoGPUs)
	n.prepared(n.manager(), mixed())
	records, record := n.recordOf("mixed-uid")
	record.Entry.Devices[0].Share.Setup = string(config.MPS)
	if err := records.Put(record.Entry); err != nil {
		t.Fatal(err)
	}
	c := withConfig(mixed(), driverName, underMPS)
	c.Status.Allocation.Devices.Config[0].Requests = []string{"a"}
	n.prepared(n.manager(), c)
}
