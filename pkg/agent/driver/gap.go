// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
)

// gapMeter measures for how long not all of the node's slices are in the API server. While they are not, nothing can be scheduled to the
// node's GPUs.
type gapMeter struct {
	clock clock.PassiveClock
	// observe gets the length of each gap.
	observe func(time.Duration)

	mu      sync.Mutex
	wanted  int
	present map[types.UID]bool
	// whole tells that all slices were there since the last change of what is wanted; only after that slices can be missed.
	whole bool
	since time.Time // the beginning of the gap, zero if there is none
}

func newGapMeter(c clock.PassiveClock) *gapMeter {
	return &gapMeter{
		clock:   c,
		observe: func(gap time.Duration) { sliceGapSeconds.Observe(gap.Seconds()) },
		present: map[types.UID]bool{},
	}
}

// want tells how many slices there should be. Slices that come and go because of that are no gap.
func (g *gapMeter) want(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if n != g.wanted {
		g.wanted, g.whole, g.since = n, false, time.Time{}
	}
	g.judge()
}

func (g *gapMeter) added(uid types.UID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.present[uid] = true
	g.judge()
}

func (g *gapMeter) deleted(uid types.UID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.present, uid)
	g.judge()
}

func (g *gapMeter) judge() {
	slicesPublished.Set(float64(len(g.present)))
	switch whole := len(g.present) >= g.wanted && g.wanted > 0; {
	case whole && !g.since.IsZero():
		g.observe(g.clock.Since(g.since))
		g.since = time.Time{}
	case whole:
		g.whole = true
	case g.whole && g.since.IsZero():
		g.since = g.clock.Now()
	}
}
