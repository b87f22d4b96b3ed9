package deviceclaims

import (
	"testing"
	"time"
)

func TestBudget(t *testing.T) {
	const timeout = 10 * time.Second
	for name, tc := range map[string]struct {
		timeout time.Duration
		begins  time.Duration // after the first long search
		has     time.Duration // 0 for no bound
	}{
		"the first long search":                  {timeout, 0, timeout},
		"while there is enough for another node": {timeout, timeout, timeout},
		"when less is left":                      {timeout, 2*timeout - time.Second, time.Second},
		"when nearly nothing is left":            {timeout, 2*timeout - 1, leastTimeout},
		"after that":                             {timeout, 10 * timeout, leastTimeout},
		"never more than the timeout":            {time.Millisecond, time.Second, time.Millisecond},
		"no timeout":                             {0, 10 * timeout, 0},
	} {
		t.Run(name, func(t *testing.T) {
			start := time.Unix(1, 0)
			now := start
			b := &budget{timeout: tc.timeout, now: func() time.Time { return now }}
			b.Begin()
			now = start.Add(tc.begins)
			end := b.Begin()
			if tc.has == 0 {
				if now = now.Add(1000 * time.Hour); b.IsOver(end) {
					t.Error("it has an end")
				}
				return
			}
			if now = now.Add(tc.has - 1); b.IsOver(end) {
				t.Errorf("it is over after %v", tc.has-1)
			}
			if now = now.Add(1); !b.IsOver(end) {
				t.Errorf("it is not over after %v", tc.has)
			}
		})
	}
}
