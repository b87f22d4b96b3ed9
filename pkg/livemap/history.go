// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package livemap

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// Kind is a kind of things that have a history.
type Kind string

const (
	// Node: a node with its GPUs, by its name.
	Node Kind = "nodes"
	// Pod: a pod that waits, by namespace/name.
	Pod Kind = "pods"
)

// Key names one of them.
type Key struct {
	Kind Kind
	Name string
}

// Value is what a thing is at some version, in parts that are JSON: a node has one for each GPU. A thing that is not there has none.
type Value []json.RawMessage

// Version counts the changes of a history. It has no gaps. The first one is above 0 and another one in each history: who has versions of
// the process before is told everything.
type Version int64

// maxFirst leaves all versions exact in JavaScript, whose numbers are up to 2^53.
const maxFirst = 1 << 52

// Limits bound what a history keeps. The present state is not counted.
type Limits struct {
	// Age is how far it goes back.
	Age time.Duration
	// Bytes is what the past may take, in bytes of JSON. Above that the oldest changes go first.
	Bytes int
}

// History is how things are and were. All methods may be called at any time; values are shared and read only.
type History struct {
	limits Limits
	first  Version

	mu sync.Mutex
	// tracks has for each key its values, oldest first.
	tracks map[Key][]entry
	// moments are the versions that can be asked for, oldest first.
	moments []moment
	// bytes is what values take that are not the present ones.
	bytes   int
	changed chan struct{}
}

// What an entry and a part take beside the JSON.
const entryBytes, partBytes = 64, 24

// entry is a value from a version on.
type entry struct {
	version Version
	value   Value
	bytes   int
}

// moment is a version with what it has changed.
type moment struct {
	version Version
	time    time.Time
	keys    []Key
}

// Moment is a version of a history.
type Moment struct {
	Version Version
	Time    time.Time
	// Changes counts the things that it has changed.
	Changes int
}

// Diff leads from one version to another one: what is different, as it is in the latter. A full one begins from nothing.
type Diff struct {
	Moment
	Full   bool
	Values map[Key]Value
	// Oldest is the first version that can be asked for.
	Oldest Version
	// Moments are those after the version that it leads from; in a full one all that can be asked for.
	Moments []Moment
}

// NewHistory returns an empty history.
func NewHistory(limits Limits) *History {
	return &History{limits: limits, first: 1 + Version(rand.Int64N(maxFirst)), tracks: map[Key][]entry{}, changed: make(chan struct{})}
}

// Commit makes a version of the values at a time, if one of them is new; the first one is made in any case. It keeps the values.
func (h *History) Commit(now time.Time, values map[Key]Value) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m := moment{version: h.first, time: now}
	if n := len(h.moments); n > 0 {
		m.version = h.moments[n-1].version + 1
		if last := h.moments[n-1].time; now.Before(last) { // the clock was set back
			m.time = last
		}
	}
	for key, value := range values {
		if h.put(m.version, key, value) {
			m.keys = append(m.keys, key)
		}
	}
	if len(m.keys) > 0 || len(h.moments) == 0 {
		h.moments = append(h.moments, m)
		close(h.changed)
		h.changed = make(chan struct{})
	}
	h.forget(now)
}

// put tells whether the value is another one than before.
func (h *History) put(version Version, key Key, value Value) bool {
	track := h.tracks[key]
	var before Value
	if len(track) > 0 {
		before = track[len(track)-1].value
	}
	same := func(a, b json.RawMessage) bool { return bytes.Equal(a, b) }
	if slices.EqualFunc(before, value, same) {
		return false
	}
	e := entry{version: version, value: slices.Clone(value), bytes: entryBytes + partBytes*len(value)}
	had := make(map[string]json.RawMessage, len(before))
	for _, part := range before {
		had[string(part)] = part
	}
	for i, part := range e.value {
		if old, ok := had[string(part)]; ok {
			e.value[i] = old // one copy for both
		} else {
			e.bytes += len(part)
		}
	}
	if len(track) > 0 {
		h.bytes += track[len(track)-1].bytes
	}
	h.tracks[key] = append(track, e)
	return true
}

// forget drops moments that are too old or too many. The last one stays.
func (h *History) forget(now time.Time) {
	for len(h.moments) > 1 {
		next := &h.moments[1]
		if now.Sub(next.time) < h.limits.Age && h.bytes <= h.limits.Bytes {
			return
		}
		for _, key := range next.keys {
			track := h.tracks[key]
			for len(track) > 1 && track[1].version <= next.version {
				h.bytes -= track[0].bytes
				track[0] = entry{}
				track = track[1:]
			}
			if h.tracks[key] = track; len(track) == 1 && len(track[0].value) == 0 {
				delete(h.tracks, key)
			}
		}
		h.moments[0] = moment{}
		h.moments = h.moments[1:]
	}
}

// Changed is closed at the next change.
func (h *History) Changed() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.changed
}

// Last is the present version; false before the first one.
func (h *History) Last() (Moment, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.moments) == 0 {
		return Moment{}, false
	}
	return h.moments[len(h.moments)-1].tell(), true
}

// At is the version that was the present one at a time, or the oldest one; false before the first one.
func (h *History) At(when time.Time) (Moment, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.moments) == 0 {
		return Moment{}, false
	}
	after, _ := slices.BinarySearchFunc(h.moments, when, func(m moment, when time.Time) int {
		if m.time.After(when) {
			return 1
		}
		return -1
	})
	return h.moments[max(0, after-1)].tell(), true
}

// Diff leads from a version to another one, which may be older, and from the nearest one that can be asked for to the nearest one. It is
// full if the version that it leads from cannot be asked for (any more), and false before the first version.
func (h *History) Diff(from, to Version) (Diff, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.moments) == 0 {
		return Diff{}, false
	}
	oldest, newest := h.moments[0].version, h.moments[len(h.moments)-1].version
	to = min(max(to, oldest), newest)
	d := Diff{Moment: h.moments[to-oldest].tell(), Full: from < oldest || from > newest, Oldest: oldest, Values: map[Key]Value{}}
	if d.Full {
		for key, track := range h.tracks {
			if value := valueAt(track, to); len(value) > 0 {
				d.Values[key] = value
			}
		}
		d.Moments = tellAll(h.moments)
		return d, true
	}
	between := h.moments[min(from, to)-oldest+1 : max(from, to)-oldest+1]
	if from < to {
		d.Moments = tellAll(between)
	}
	for _, m := range between {
		for _, key := range m.keys {
			d.Values[key] = valueAt(h.tracks[key], to)
		}
	}
	return d, true
}

// valueAt is the value of a version: nil if it was not there.
func valueAt(track []entry, version Version) Value {
	after, _ := slices.BinarySearchFunc(track, version, func(e entry, version Version) int {
		if e.version > version {
			return 1
		}
		return -1
	})
	if after == 0 {
		return nil
	}
	return track[after-1].value
}

func (m *moment) tell() Moment { return Moment{Version: m.version, Time: m.time, Changes: len(m.keys)} }

func tellAll(moments []moment) []Moment {
	told := make([]Moment, 0, len(moments))
	for i := range moments {
		told = append(told, moments[i].tell())
	}
	return told
}
