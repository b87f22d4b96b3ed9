// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRulesAreReadFromFlags(t *testing.T) {
	tests := map[string]struct {
		allow, shares string
		want          Rules
		whole, share  string // as they are published
		err           []string
	}{
		"both":             {allow: "time-slicing,mps", shares: "time-slicing", want: Rules{Node: "n", Allowed: []Strategy{TimeSlicing, MPS}, Shares: TimeSlicing}, whole: "TimeSlicing,MPS", share: "TimeSlicing"},
		"in another order": {allow: "mps,time-slicing", shares: "mps", want: Rules{Node: "n", Allowed: []Strategy{TimeSlicing, MPS}, Shares: MPS}, whole: "TimeSlicing,MPS", share: "MPS"},
		"one":              {allow: "mps", shares: "mps", want: Rules{Node: "n", Allowed: []Strategy{MPS}, Shares: MPS}, whole: "MPS", share: "MPS"},
		"none":             {allow: "none", shares: "time-slicing", want: Rules{Node: "n", Shares: TimeSlicing}, whole: "none", share: "TimeSlicing"},
		"nothing":          {allow: "", shares: "time-slicing", err: []string{"--allow-sharing", `""`, "none", "time-slicing, mps"}},
		"what is not one":  {allow: "mps,exclusive", shares: "mps", err: []string{"--allow-sharing", `"mps,exclusive"`}},
		"one twice":        {allow: "mps,mps", shares: "mps", err: []string{"--allow-sharing", `"mps,mps"`}},
		"one and none":     {allow: "mps,none", shares: "mps", err: []string{"--allow-sharing", `"mps,none"`}},
		"shares of none":   {allow: "mps", shares: "none", err: []string{"--share-strategy", `"none"`, "time-slicing or mps"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := ParseRules("n", tc.allow, tc.shares)
			if len(tc.err) > 0 {
				if err == nil {
					t.Fatalf("%+v, want an error", got)
				}
				for _, want := range tc.err {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("error %q does not say %q", err, want)
					}
				}
				return
			}
			if diff := cmp.Diff(tc.want, got); diff != "" || err != nil {
				t.Fatalf("%v (-want +got):\n%s", err, diff)
			}
			if whole, share := got.Strategies(false), got.Strategies(true); whole != tc.whole || share != tc.share {
				t.Errorf("published %q of a GPU and %q of a share, want %q and %q", whole, share, tc.whole, tc.share)
			}
		})
	}
}

// TestANodeWithoutMPSSaysSo: devices do not offer it, and a claim that asks for it, or gets a share of it, is refused with the reason.
func TestANodeWithoutMPSSaysSo(t *testing.T) {
	const why = "the host has no systemd"
	tests := []struct {
		allowed      []Strategy
		shares       Strategy
		whole, share string
		refused      map[bool][]Strategy // what is refused, by whether it is of a share
	}{
		{[]Strategy{TimeSlicing, MPS}, TimeSlicing, "TimeSlicing", "TimeSlicing", map[bool][]Strategy{false: {MPS}, true: {MPS}}},
		{[]Strategy{MPS}, MPS, "none", "none", map[bool][]Strategy{false: {MPS}, true: {"", MPS, TimeSlicing}}},
	}
	for _, tc := range tests {
		r := Rules{Node: "node-1", Allowed: tc.allowed, Shares: tc.shares, NoMPS: why}
		if whole, share := r.Strategies(false), r.Strategies(true); whole != tc.whole || share != tc.share {
			t.Errorf("%v: published %q of a GPU and %q of a share, want %q and %q", tc.allowed, whole, share, tc.whole, tc.share)
		}
		for share, strategies := range tc.refused {
			for _, strategy := range strategies {
				err := r.check(Settings{Strategy: strategy}, share)
				if err == nil || !strings.Contains(err.Error(), why) || !strings.Contains(err.Error(), `sharing.strategy: "MPS": node node-1`) || !strings.Contains(err.Error(), AttributeStrategies) {
					t.Errorf("%v, %q of a share: %t: %v", tc.allowed, strategy, share, err)
				}
			}
		}
		if err := r.check(Settings{Strategy: Exclusive}, false); err != nil {
			t.Errorf("%v: exclusive use: %v", tc.allowed, err)
		}
	}
}
