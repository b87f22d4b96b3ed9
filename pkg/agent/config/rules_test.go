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
