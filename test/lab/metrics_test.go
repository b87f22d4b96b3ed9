// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package lab

import "testing"

func TestMetricsAreAddedBySeries(t *testing.T) {
	m, err := ParseMetrics([]byte(`# TYPE calls_seconds histogram
calls_seconds_bucket{operation="prepare",outcome="ok",le="1"} 2
calls_seconds_bucket{operation="prepare",outcome="ok",le="+Inf"} 3
calls_seconds_sum{operation="prepare",outcome="ok"} 4.5
calls_seconds_count{operation="prepare",outcome="ok"} 3
calls_seconds_bucket{operation="prepare",outcome="error",le="+Inf"} 1
calls_seconds_sum{operation="prepare",outcome="error"} 15
calls_seconds_count{operation="prepare",outcome="error"} 1
# TYPE in_flight gauge
in_flight{operation="prepare"} 7
in_flight{operation="unprepare"} 2
`))
	if err != nil {
		t.Fatal(err)
	}
	for what, got := range map[string][2]float64{
		"all observations":       {m.Count("calls_seconds"), 4},
		"those of one series":    {m.Count("calls_seconds", "operation", "prepare", "outcome", "error"), 1},
		"sum":                    {m.Sum("calls_seconds", "outcome", "ok"), 4.5},
		"gauge":                  {m.Sum("in_flight", "operation", "unprepare"), 2},
		"a value that is not":    {m.Count("calls_seconds", "outcome", "maybe"), 0},
		"a label that is not":    {m.Sum("in_flight", "claim", ""), 0},
		"a metric that is not":   {m.Sum("calls_minutes"), 0},
		"all series of one name": {m.Sum("in_flight"), 9},
	} {
		if got[0] != got[1] {
			t.Errorf("%s: got %g, want %g", what, got[0], got[1])
		}
	}
	if _, err := ParseMetrics([]byte("{no metrics")); err == nil {
		t.Error("no error for a text that is not in the format")
	}
}
