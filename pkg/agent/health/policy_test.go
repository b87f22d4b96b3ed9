// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"strings"
	"testing"
	"time"

	"stowage.dev/stowage/pkg/agent/nvml"
)

func TestRulesAreSoftenedAsTheyAreWritten(t *testing.T) {
	tests := map[string]struct {
		policy string
		seen   seen
		want   string // of an L40S
	}{
		"nothing is":                {"", xid(74, nil), "Unhealthy xid=74"},
		"told only":                 {"xid=notice", xid(74, nil), "Healthy xid=74"},
		"not even told":             {"xid=off", xid(74, nil), "Healthy"},
		"one XID":                   {"xid/74=off", xid(74, nil), "Healthy"},
		"another XID":               {"xid/74=off", xid(119, nil), "Unhealthy xid=119"},
		"of this product":           {"NVIDIA L40S:xid=off", xid(74, nil), "Healthy"},
		"of another product":        {"Tesla T4:xid=off", xid(74, nil), "Unhealthy xid=74"},
		"but of this product":       {"xid=off,NVIDIA L40S:xid=avoid", xid(74, nil), "Unhealthy xid=74"},
		"the later one counts":      {"NVIDIA L40S:xid=avoid , xid=off", xid(74, nil), "Healthy"},
		"errors of the memory":      {"ecc-uncorrected=off", uncorrected(3), "Healthy"},
		"another rule stays":        {"ecc-uncorrected=off", xid(74, nil), "Unhealthy xid=74"},
		"one XID after another":     {"xid/74=off", then(xid(95, nil), xid(74, nil)), "Unhealthy xid=95"},
		"one XID before another":    {"xid/74=off", then(xid(74, nil), xid(95, nil)), "Unhealthy xid=95"},
		"a notice after a fault":    {"xid/74=notice", then(xid(95, nil), xid(74, nil)), "Unhealthy xid=95"},
		"a notice before a fault":   {"xid/74=notice", then(xid(74, nil), xid(95, nil)), "Unhealthy xid=95"},
		"the later of two faults":   {"xid/74=off", then(xid(95, nil), xid(119, nil)), "Unhealthy xid=119"},
		"the later of two notices":  {"xid/74=notice,xid/119=notice", then(xid(74, nil), xid(119, nil)), "Healthy xid=119"},
		"an answer that is missing": {"no-answer=avoid,no-driver=avoid", failed(nvml.ErrDriverNotLoaded), "Unhealthy no-driver"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			policy, err := ParsePolicy(tc.policy)
			if err != nil {
				t.Fatal(err)
			}
			s := State{policy: policy}
			s.Is("GPU-1", "NVIDIA L40S")
			s.Answered(start, well())
			tc.seen(start, &s)
			tc.seen(start.Add(time.Minute), &s)
			if got := told(s.Of(nil)); got != tc.want {
				t.Errorf("%q, want %q", got, tc.want)
			}
			// An agent that starts now tells the same, and goes on from there.
			data, err := s.encode("boot")
			if err != nil {
				t.Fatal(err)
			}
			kept, err := decode(data, "boot")
			if err != nil {
				t.Fatal(err)
			}
			kept.asked, kept.readings, kept.policy = s.asked, s.readings, s.policy
			kept.Is("GPU-1", "NVIDIA L40S")
			if got := told(kept.Of(nil)); got != tc.want {
				t.Errorf("after a restart: %q, want %q", got, tc.want)
			}
			tc.seen(start.Add(2*time.Minute), &kept)
			if got := told(kept.Of(nil)); got != tc.want {
				t.Errorf("seen again after a restart: %q, want %q", got, tc.want)
			}
		})
	}
}

// TestASofterFaultDoesNotProlongAHarderOne: the quiet time is that of the fault that is told.
func TestASofterFaultDoesNotProlongAHarderOne(t *testing.T) {
	for _, policy := range []string{"xid/74=off", "xid/74=notice"} {
		var s State
		var err error
		if s.policy, err = ParsePolicy(policy); err != nil {
			t.Fatal(err)
		}
		s.Is("GPU-1", "NVIDIA L40S")
		xid(95, nil)(start, &s)
		s.Answered(start, well())
		xid(74, nil)(start.Add(5*time.Minute), &s)
		s.Answered(start.Add(10*time.Minute), well())
		if got := told(s.Of(nil)); got != "Healthy" {
			t.Errorf("%s: %q after XID 95's quiet time", policy, got)
		}
	}
}

// TestALostGPUWithASofterRuleMovesNobody, and a record of an agent with other rules is judged by those of now.
func TestALostGPUWithASofterRuleMovesNobody(t *testing.T) {
	var s State
	for i := range 3 {
		failed(nvml.ErrGPULost)(start.Add(time.Duration(i)*PollInterval), &s)
	}
	severity := func(s *State) Severity { return s.Of(nil).Faults[0].Severity() }
	if got := severity(&s); got != Evict {
		t.Errorf("severity %d of a lost GPU, want %d", got, Evict)
	}
	data, err := s.encode("boot")
	if err != nil {
		t.Fatal(err)
	}
	kept, err := decode(data, "boot")
	if err != nil {
		t.Fatal(err)
	}
	if kept.policy, err = ParsePolicy("gpu-lost=avoid"); err != nil {
		t.Fatal(err)
	}
	kept.Is("GPU-1", "NVIDIA L40S")
	if got := severity(&kept); got != Avoid {
		t.Errorf("severity %d with the rule softened, want %d", got, Avoid)
	}
}

// TestMemoryThatIsLeftMayKeepPodsAway: it is only told unless the policy says more, for all GPUs or for those of a product.
func TestMemoryThatIsLeftMayKeepPodsAway(t *testing.T) {
	for text, want := range map[string]Status{
		"": Healthy, "memory-left=avoid": Unhealthy, "NVIDIA L40S:memory-left=avoid": Unhealthy, "Tesla T4:memory-left=avoid": Healthy,
	} {
		policy, err := ParsePolicy(text)
		if err != nil {
			t.Fatal(err)
		}
		s := State{policy: policy}
		s.Is("GPU-1", "NVIDIA L40S")
		for look := range 2 {
			s.Left(start.Add(time.Duration(look)*LookInterval), new(uint64(1)<<30))
		}
		verdict := s.Of(nil)
		if len(verdict.Faults) != 1 || verdict.Faults[0].Reason != MemoryLeft {
			t.Fatalf("%q: faults %v", text, verdict.Faults)
		}
		if got := verdict.Faults[0].Severity() > Notice; got != (want == Unhealthy) {
			t.Errorf("%q: severity %d, want pods kept away %t", text, verdict.Faults[0].Severity(), want == Unhealthy)
		}
	}
}

func TestABadPolicyIsRefusedNamingTheItem(t *testing.T) {
	for policy, want := range map[string]string{
		"pcie-width":               `"pcie-width": want a rule and what becomes of it`,
		"lanes=off":                `no rule "lanes": there are ecc-uncorrected, gpu-lost,`,
		"xid=off,pcie-width=maybe": `"pcie-width=maybe": "maybe": want off, notice or avoid`,
		"xid/many=off":             "want an XID by its number",
		"ecc-uncorrected/74=off":   "want an XID by its number",
		"xid/0=off":                "want an XID by its number",
		"row-remap-pending=avoid":  "can be softened only",
		"xid/79=notice":            "XID 79 says that the GPU is lost, which is the rule gpu-lost",
		"gpu-lost=off":             "gpu-lost: want avoid, or the rule as it is",
		"NVIDIA L40S:hung=notice":  "hung: want avoid",
		"no-answer=off":            "no-answer: want avoid",
		"no-driver=notice":         "no-driver: want avoid",
		"gpu-lost=evict":           `"evict": want off, notice or avoid`,
	} {
		if _, err := ParsePolicy(policy); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want an error that says %q", policy, err, want)
		}
	}
}
