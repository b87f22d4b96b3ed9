// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/usage"
)

// TestConcurrentSchedulingNeverHandsOutADeviceTwice lets many pods compete for
// few devices, against a server that gives every write a revision, with a watch
// that lags, relists now and then, and frees what pods have had.
func TestConcurrentSchedulingNeverHandsOutADeviceTwice(t *testing.T) {
	const pods, atOnce, nodes, perNode = 400, 24, 4, 4
	tr := quiet()
	s := &competition{tracker: tr, claims: map[string]*resourceapi.ResourceClaim{}, owner: map[usage.DeviceID]string{}}
	for i := range pods {
		s.write(fmt.Sprintf("c%d", i), func(c *resourceapi.ResourceClaim) {})
	}
	s.catchUp(t, true)

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	var watching, scheduling sync.WaitGroup
	watching.Go(func() {
		for i := 1; ctx.Err() == nil; i++ {
			s.catchUp(t, i%50 == 0)
			runtime.Gosched()
		}
	})
	tr.Subscribe(func(Event) { tr.Snapshot() })
	watching.Go(func() { tr.deliverEvents(ctx) })
	for worker := range atOnce {
		scheduling.Go(func() {
			for i := worker; i < pods; i += atOnce {
				s.schedule(ctx, t, fmt.Sprintf("c%d", i), nodes, perNode)
			}
		})
	}
	scheduling.Wait()
	cancel()
	watching.Wait()

	s.catchUp(t, false)
	wantHeld(t, tr, "in the end", nil)
	if n := len(tr.inFlight); n > 0 {
		t.Errorf("%d claims are in flight still", n)
	}
	if got := tr.Snapshot().Usage.Len(); got != 0 {
		t.Errorf("Len() = %d", got)
	}
}

// competition is the API server of the test.
type competition struct {
	tracker *Tracker

	mutex  sync.Mutex
	claims map[string]*resourceapi.ResourceClaim
	owner  map[usage.DeviceID]string
	log    []*resourceapi.ResourceClaim
	seen   int
	double []string
}

// write changes a claim and returns what the server answers.
func (s *competition) write(name string, change func(*resourceapi.ResourceClaim)) *resourceapi.ResourceClaim {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	c := claim(name, types.UID(name), 0)
	if s.claims[name] != nil {
		c = s.claims[name].DeepCopy()
		s.own(c, "")
	}
	change(c)
	s.own(c, name)
	c.ResourceVersion = strconv.Itoa(len(s.log) + 1)
	s.claims[name] = c
	s.log = append(s.log, c)
	return c
}

// own notes whose the devices of a claim are, and complains if they are
// somebody else's.
func (s *competition) own(c *resourceapi.ResourceClaim, name string) {
	if c.Status.Allocation == nil {
		return
	}
	for _, r := range c.Status.Allocation.Devices.Results {
		d := usage.DeviceOf(&r)
		if name != "" && s.owner[d] != "" {
			s.double = append(s.double, fmt.Sprintf("%s: %s and %s", d, s.owner[d], name))
		}
		s.owner[d] = name
	}
}

// catchUp brings the tracker up to what the server has, by events or by a list.
func (s *competition) catchUp(t *testing.T, byList bool) {
	s.mutex.Lock()
	events := s.log[s.seen:]
	s.seen = len(s.log)
	var list []any
	for _, c := range s.claims {
		list = append(list, c)
	}
	version, double := strconv.Itoa(s.seen), s.double
	s.double = nil
	s.mutex.Unlock()

	for _, d := range double {
		t.Errorf("device handed out twice: %s", d)
	}
	if byList {
		if err := s.tracker.Store().Replace(list, version); err != nil {
			t.Error(err)
		}
		return
	}
	for _, c := range events {
		if err := s.tracker.Store().Update(c); err != nil {
			t.Error(err)
		}
	}
}

// schedule gives a claim a device, writes it, and takes it back.
func (s *competition) schedule(ctx context.Context, t *testing.T, name string, nodes, perNode int) {
	pod := types.UID("pod-" + name)
	for try := 1; ; try++ {
		if ctx.Err() != nil {
			t.Errorf("%s: gave up after %d attempts: %v", name, try-1, ctx.Err())
			return
		}
		snapshot := s.tracker.Snapshot()
		chosen, found := usage.DeviceID{}, false
		for i := range nodes * perNode {
			i = (i + try) % (nodes * perNode)
			if d := device(fmt.Sprintf("node-%d", i%nodes), fmt.Sprintf("gpu-%d", i/nodes)); snapshot.Usage.Device(d) == nil {
				chosen, found = d, true
				break
			}
		}
		if !found {
			runtime.Gosched()
			continue
		}
		c, err := s.tracker.Get("default", name)
		if err != nil {
			t.Error(err)
			return
		}
		a := allocation(chosen)
		err = s.tracker.Reserve(snapshot.Usage, pod, []Reservation{{Claim: c, Allocation: a}})
		if errors.Is(err, ErrStale) {
			continue
		}
		if err != nil {
			t.Error(err)
			return
		}
		if try%3 == 0 && len(name)%2 == 0 { // goes elsewhere, and comes back
			s.tracker.Release(c.UID, pod)
			continue
		}
		answer := s.write(name, func(c *resourceapi.ResourceClaim) { c.Status.Allocation = a })
		if err := s.tracker.Assume(answer); err != nil {
			t.Error(err)
		}
		s.tracker.Release(c.UID, pod)
		s.write(name, func(c *resourceapi.ResourceClaim) { c.Status.Allocation = nil })
		return
	}
}
