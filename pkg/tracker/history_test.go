// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/usage"
)

// history records what callers do with a tracker and what they get, with the
// order in which calls begin and end.
type history struct {
	tracker *Tracker
	clock   atomic.Int64

	mutex       sync.Mutex
	operations  []porcupine.Operation
	subscribers int
	clients     int
	listening   sync.WaitGroup // for the last event
}

// client is one goroutine's side of a history.
type client struct {
	*history
	id int
	// restless gives way to others inside the recorded interval, so that the
	// intervals overlap though the calls are short.
	restless *rand.Rand
}

func (h *history) client(seed uint64) *client {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	h.clients++
	return &client{history: h, id: h.clients - 1, restless: rand.New(rand.NewPCG(seed, uint64(h.clients)))}
}

// record notes an operation, whose outputs run fills in.
func (c *client) record(o operation, run func()) {
	call := c.clock.Add(1)
	c.pause()
	run()
	c.pause()
	c.note(o, call, c.clock.Add(1))
}

func (c *client) pause() {
	for range c.restless.IntN(3) {
		runtime.Gosched()
	}
}

func (c *client) note(o operation, call, end int64) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.operations = append(c.operations, porcupine.Operation{ClientId: c.id, Input: o, Call: call, Return: end})
}

func (c *client) snapshot() (snapshot Snapshot) {
	o := &opSnapshot{}
	c.record(o, func() { snapshot = c.tracker.Snapshot() })
	o.revision, o.holders = snapshot.Revision, spelled(snapshot.Usage)
	return snapshot
}

// spelled spells out a usage as sequential.holders does.
func spelled(view usage.View) map[string][]string {
	found := map[string][]string{}
	for id, d := range view.All() {
		for _, h := range d.Holders() {
			found[id.String()] = append(found[id.String()], holderName(h.Claim.UID, h.InFlight, ptr.Deref(h.ShareID, "")))
		}
		slices.Sort(found[id.String()])
	}
	return found
}

func (c *client) get(name string) (claim *resourceapi.ResourceClaim) {
	o := &opGet{name: name}
	c.record(o, func() { claim, _ = c.tracker.Get("default", name) })
	if claim != nil {
		o.claim = ptr.To(factOf(claim))
	}
	return claim
}

func (c *client) reserve(on Snapshot, owner types.UID, reservations ...Reservation) (err error) {
	o := &opReserve{revision: on.Revision, inUse: map[string]bool{}, owner: owner}
	for id := range on.Usage.All() {
		o.inUse[id.Pool] = true
	}
	for _, r := range reservations {
		o.wants = append(o.wants, want{factOf(r.Claim), takesOf(r.Allocation)})
	}
	c.record(o, func() { err = c.tracker.Reserve(on.Usage, owner, reservations) })
	o.err = err
	if heldErr := (*HeldError)(nil); errors.As(err, &heldErr) {
		o.err = errHeld
	}
	return err
}

func (c *client) assume(claim *resourceapi.ResourceClaim) (err error) {
	o := &opAssume{claim: factOf(claim)}
	c.record(o, func() { err = c.tracker.Assume(claim) })
	o.err = err
	return err
}

func (c *client) share(claim, owner types.UID) bool {
	o := &opShare{uid: claim, owner: owner}
	var allocation *resourceapi.AllocationResult
	c.record(o, func() { allocation, o.ok = c.tracker.Share(claim, owner) })
	o.takes = takesOf(allocation)
	return o.ok
}

func (c *client) pending(claim types.UID) {
	o := &opPending{uid: claim}
	var allocation *resourceapi.AllocationResult
	c.record(o, func() { allocation, o.sharers = c.tracker.Pending(claim) })
	o.takes = takesOf(allocation)
}

func (c *client) release(claim, owner types.UID) {
	o := &opRelease{uid: claim, owner: owner}
	c.record(o, func() { o.last = c.tracker.Release(claim, owner) })
}

// subscribe records what the tracker tells a new subscriber.
func (c *client) subscribe() {
	c.mutex.Lock()
	subscriber := c.subscribers
	c.subscribers++
	c.mutex.Unlock()
	listener := c.client(0)
	c.listening.Add(1)
	c.record(&opSubscribe{subscriber}, func() {
		c.tracker.Subscribe(func(e Event) {
			var before, after int
			if e.Old != nil {
				before = revisionOf(e.Old)
			}
			if e.New != nil {
				after = revisionOf(e.New)
			}
			var freed []string
			for _, d := range e.Freed {
				freed = append(freed, d.String())
			}
			slices.Sort(freed)
			call := listener.clock.Add(1)
			listener.note(&opHeard{subscriber, toldOf(e.Revision, e.Kind, e.Claim.UID, before, after, freed)}, call, listener.clock.Add(1))
			if e.Claim.UID == lastUID {
				c.listening.Done()
			}
		})
	})
}

// recordingStore records what a Reflector writes to the tracker.
type recordingStore struct {
	cache.ReflectorStore
	client *client
}

var _ cache.ReflectorBookmarkStore = recordingStore{}

func (c *client) store() recordingStore { return recordingStore{c.tracker.Store(), c} }

func (s recordingStore) Add(obj any) (err error) {
	s.client.record(&opObserve{factOf(obj.(*resourceapi.ResourceClaim))}, func() { err = s.ReflectorStore.Add(obj) })
	return err
}

func (s recordingStore) Update(obj any) (err error) {
	s.client.record(&opObserve{factOf(obj.(*resourceapi.ResourceClaim))}, func() { err = s.ReflectorStore.Update(obj) })
	return err
}

func (s recordingStore) Delete(obj any) (err error) {
	s.client.record(&opDelete{factOf(obj.(*resourceapi.ResourceClaim))}, func() { err = s.ReflectorStore.Delete(obj) })
	return err
}

func (s recordingStore) Replace(objs []any, version string) (err error) {
	o := &opReplace{}
	o.revision, err = strconv.Atoi(version)
	if err != nil {
		return err
	}
	for _, obj := range objs {
		o.claims = append(o.claims, factOf(obj.(*resourceapi.ResourceClaim)))
	}
	s.client.record(o, func() { err = s.ReflectorStore.Replace(objs, version) })
	return err
}

func (s recordingStore) Bookmark(version string) (err error) {
	o := &opBookmark{}
	o.revision, err = strconv.Atoi(version)
	if err != nil {
		return err
	}
	s.client.record(o, func() { err = s.ReflectorStore.(cache.ReflectorBookmarkStore).Bookmark(version) })
	return err
}

// deliver delivers events until the returned function is called, which waits
// until the subscribers have heard all there is to tell.
func (h *history) deliver() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { h.tracker.deliverEvents(ctx) })
	return func() {
		_ = h.client(0).store().Add(claim("last", lastUID, lastRevision))
		h.listening.Wait()
		cancel()
		wg.Wait()
	}
}

// The last claim that a history tells of.
const (
	lastUID      types.UID = "last"
	lastRevision int       = 1_000_000
)

// judgement is how long it may take to judge a history. It takes less than a
// second with the race detector on a busy machine.
const judgement = 5 * time.Minute

// judge fails the test if no order of the operations that is compatible with
// their intervals explains all outputs, or if that cannot be told. It leaves a
// picture of the history then.
func (h *history) judge(t *testing.T, name string) {
	t.Helper()
	h.mutex.Lock()
	defer h.mutex.Unlock()
	operations := slices.Clone(h.operations)
	for subscriber := range h.subscribers {
		now := h.clock.Add(1)
		operations = append(operations, porcupine.Operation{Input: &opHeardAll{subscriber}, Call: now, Return: h.clock.Add(1)})
	}
	model := sequentialModel()
	result, info := porcupine.CheckOperationsVerbose(model, operations, judgement)
	if result == porcupine.Ok {
		return
	}
	picture := filepath.Join(os.TempDir(), strings.ReplaceAll(t.Name(), "/", "-")+"-"+strings.ReplaceAll(name, " ", "-")+".html")
	if err := porcupine.VisualizePath(model, info, picture); err != nil {
		picture = err.Error()
	}
	if result == porcupine.Unknown {
		t.Errorf("%s: cannot tell within %s whether a history of %d operations is linearizable; picture: %s", name, judgement, len(operations), picture)
		return
	}
	t.Errorf("%s: history of %d operations is not linearizable; picture: %s", name, len(operations), picture)
}
