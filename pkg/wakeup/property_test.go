// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package wakeup

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"
)

// Whatever happens, in whatever order it is heard of: once all is quiet no pod sleeps that fits, and nobody was woken that did not fit
// when it was woken. The judge is the allocator, asked for every node.
func TestNobodySleepsWhoFitsAndNobodyIsWokenWhoDoesNot(t *testing.T) { checkRest(t, false) }

// So it is where claims of several namespaces want shares of devices, some of which give theirs to one namespace at a time.
func TestNobodySleepsWhoFitsBesideOtherNamespaces(t *testing.T) { checkRest(t, true) }

func checkRest(t *testing.T, shares bool) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{t: t, shares: shares, cluster: newCluster(t, Options{}), running: map[types.UID]*attempt{}, again: map[types.UID]bool{}, others: map[types.UID]map[string]bool{}, slices: map[string]*resourceapi.ResourceSlice{}}
		m.setClass(class("small", "true"))
		m.setClass(class("gpu", "true"))
		for i := range rapid.IntRange(1, 3).Draw(t, "nodes") {
			m.newNode(fmt.Sprintf("n%d", i))
		}
		t.Repeat(map[string]func(*rapid.T){
			"pod":     m.addAPod,
			"begin":   m.beginOne,
			"end":     m.endOne,
			"release": m.releaseOne,
			"slice":   m.changeASlice,
			"class":   m.changeAClass,
			"node":    m.addANode,
			"delete":  m.deleteAPod,
			"hear":    m.hearOne,
			"pass":    func(*rapid.T) { m.wake() },
			"during":  m.somethingDuringAnAttempt,
		})
		m.settle()
	})
}

// model is a scheduler with a queue, whose events are heard of late.
type model struct {
	*cluster

	t *rapid.T
	// shares tells that devices are given out in shares.
	shares bool
	// queue has the pods to be tried, running those being tried; asleep has those that wait.
	queue, asleep []types.UID
	running       map[types.UID]*attempt
	// again has the pods that were woken while they were tried.
	again map[types.UID]bool
	// others are, by pod, the nodes that other plugins refuse.
	others map[types.UID]map[string]bool
	bound  []types.UID
	slices map[string]*resourceapi.ResourceSlice
	// claimEvents and sliceEvents are not heard of yet. Each kind comes in order.
	claimEvents, sliceEvents []func()
	made                     int
	// due is when the last pass asked for the next one, zero if it did not.
	due time.Time
}

func pick[T any](t *rapid.T, what string, from []T) (T, bool) {
	if len(from) == 0 {
		var none T
		return none, false
	}
	return from[rapid.IntRange(0, len(from)-1).Draw(t, what)], true
}

func (m *model) newNode(name string) {
	m.addNode(name)
	s := m.drawSlice(m.t, name, 3)
	m.sliceEvents = append(m.sliceEvents, m.setSlice(m.slices[name], s))
	m.slices[name] = s
}

// drawSlice is a slice with at most that many devices, some of which are tainted.
func (m *model) drawSlice(t *rapid.T, name string, most int) *resourceapi.ResourceSlice {
	n := rapid.IntRange(0, most).Draw(t, "devices")
	s := slice(name, n, rapid.IntRange(0, n).Draw(t, "tainted"))
	if m.shares {
		s.Spec.Driver = "gpu.nvidia.com"
		for i := range s.Spec.Devices {
			giveOutInShares(&s.Spec.Devices[i], rapid.IntRange(0, 3).Draw(t, "of one namespace") > 0)
		}
	}
	return s
}

func (m *model) addAPod(t *rapid.T) {
	m.made++
	name := fmt.Sprintf("p%d", m.made)
	pod := m.addPod(name, int32(rapid.IntRange(0, 2).Draw(t, "priority")), rapid.SampledFrom([]string{"gpu", "small", "late"}).Draw(t, "class"), int64(rapid.IntRange(1, 2).Draw(t, "count")))
	if m.shares {
		m.takesShare(pod, rapid.SampledFrom([]string{"team-a", "team-b", "team-c"}).Draw(t, "namespace"))
	}
	refused := map[string]bool{}
	for _, node := range m.nodes {
		if rapid.IntRange(0, 4).Draw(t, "refused by others") == 0 {
			refused[node.Name] = true
		}
	}
	m.others[pod.UID] = refused
	m.queue = append(m.queue, pod.UID)
}

func (m *model) beginOne(t *rapid.T) {
	uid, ok := pick(t, "pod", m.queue)
	if !ok {
		return
	}
	m.queue = slices.DeleteFunc(m.queue, func(other types.UID) bool { return other == uid })
	m.running[uid] = m.begin(m.pods[uid])
}

func (m *model) endOne(t *rapid.T) {
	if uid, ok := pick(t, "attempt", slices.Sorted(maps.Keys(m.running))); ok {
		m.endAttempt(uid)
	}
}

// somethingDuringAnAttempt is what seldom comes together by itself: devices come while one pod is tried, and are offered to others first.
func (m *model) somethingDuringAnAttempt(t *rapid.T) {
	uid, ok := pick(t, "pod", m.queue)
	if !ok {
		return
	}
	m.queue = slices.DeleteFunc(m.queue, func(other types.UID) bool { return other == uid })
	m.running[uid] = m.begin(m.pods[uid])
	m.changeASlice(t)
	for _, event := range m.sliceEvents {
		event()
	}
	m.sliceEvents = nil
	m.wake()
	m.endAttempt(uid)
}

func (m *model) endAttempt(uid types.UID) {
	a := m.running[uid]
	delete(m.running, uid)
	again := m.again[uid]
	delete(m.again, uid)
	switch a.end(m.others[uid]) {
	case "":
		if again {
			m.queue = append(m.queue, uid)
			return
		}
		m.asleep = append(m.asleep, uid)
		// The scheduling queue shows a pod what happened to nodes while it was tried.
		for _, node := range m.nodes[len(a.nodes):] {
			m.room.NodeChanged(uid, node.Name)
		}
	default:
		m.bound = append(m.bound, uid)
		m.room.Gone(uid, true)
	}
}

func (m *model) releaseOne(t *rapid.T) {
	uid, ok := pick(t, "bound pod", m.bound)
	if !ok {
		return
	}
	m.bound = slices.DeleteFunc(m.bound, func(other types.UID) bool { return other == uid })
	m.claimEvents = append(m.claimEvents, m.release(m.claims[uid]))
	delete(m.pods, uid)
}

func (m *model) changeASlice(t *rapid.T) {
	name, ok := pick(t, "slice", slices.Sorted(maps.Keys(m.slices)))
	if !ok {
		return
	}
	s := m.drawSlice(t, name, 4)
	m.sliceEvents = append(m.sliceEvents, m.setSlice(m.slices[name], s))
	m.slices[name] = s
}

func (m *model) changeAClass(t *rapid.T) {
	name := rapid.SampledFrom([]string{"small", "late"}).Draw(t, "class")
	selector := rapid.SampledFrom([]string{"true", "false"}).Draw(t, "selector")
	// Classes are heard of beside slices, and soon or late.
	event := m.setClass(class(name, selector))
	m.claimEvents = append(m.claimEvents, event)
}

func (m *model) addANode(t *rapid.T) {
	if len(m.nodes) >= 5 {
		return
	}
	name := fmt.Sprintf("n%d", len(m.nodes))
	m.newNode(name)
	for _, uid := range m.asleep {
		m.room.NodeChanged(uid, name)
	}
}

func (m *model) deleteAPod(t *rapid.T) {
	uid, ok := pick(t, "sleeping or queued pod", slices.Concat(m.asleep, m.queue))
	if !ok {
		return
	}
	is := func(other types.UID) bool { return other == uid }
	m.asleep, m.queue = slices.DeleteFunc(m.asleep, is), slices.DeleteFunc(m.queue, is)
	delete(m.pods, uid)
	m.room.Gone(uid, false)
}

func (m *model) hearOne(t *rapid.T) {
	events := &m.claimEvents
	if rapid.Bool().Draw(t, "of a slice") {
		events = &m.sliceEvents
	}
	if len(*events) > 0 {
		(*events)[0]()
		*events = (*events)[1:]
	}
}

// wake wakes pods and checks that each of them fits.
func (m *model) wake() (n int) {
	wakes, due := passOf(context.Background(), m.room, m.world())
	m.due = due
	for _, wake := range wakes {
		uid := wake.Pod.UID
		if wake.Cause != CauseRetry && !(wake.Cause == CauseClass) && len(m.fitting(wake.Pod)) == 0 {
			m.t.Fatalf("pod %s was woken because of %s and fits nowhere", uid, wake.Cause)
		}
		switch {
		case m.running[uid] != nil:
			m.again[uid] = true
		case slices.Contains(m.asleep, uid):
			m.asleep = slices.DeleteFunc(m.asleep, func(other types.UID) bool { return other == uid })
			m.queue = append(m.queue, uid)
		}
	}
	return len(wakes)
}

// fitting are the nodes that have the devices for a pod, leaving aside what other plugins say.
func (m *model) fitting(pod *v1.Pod) []string {
	q := m.look(pod, m.store.View())
	if q.Err != nil {
		return nil
	}
	var names []string
	for _, node := range m.nodes {
		if m.fits(q, node, m.store.View(), m.index.View()) {
			names = append(names, node.Name)
		}
	}
	return names
}

// settle lets everything happen that is to happen, and looks for pods that sleep and fit. No time passes before nothing else is left to
// happen.
func (m *model) settle() {
	for quiet := false; !quiet; {
		quiet = true
		for _, events := range []*[]func(){&m.claimEvents, &m.sliceEvents} {
			for _, event := range *events {
				event()
				quiet = false
			}
			*events = nil
		}
		for len(m.queue) > 0 {
			uid := m.queue[0]
			m.queue = m.queue[1:]
			m.running[uid] = m.begin(m.pods[uid])
			quiet = false
		}
		for _, uid := range slices.Sorted(maps.Keys(m.running)) {
			m.endAttempt(uid)
			quiet = false
		}
		if m.wake() > 0 {
			quiet = false
		} else if quiet && !m.due.IsZero() {
			m.now, quiet = m.due, false
		}
	}
	for _, uid := range m.asleep {
		for _, node := range m.fitting(m.pods[uid]) {
			if !m.others[uid][node] {
				m.t.Fatalf("pod %s sleeps and fits %s", uid, node)
			}
		}
	}
	if n := len(m.room.woken); n > 0 {
		m.t.Fatalf("%d pods are still counted as woken", n)
	}
}
