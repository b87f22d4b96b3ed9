// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package livemap

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

var start = time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)

func value(parts ...string) (v Value) {
	for _, part := range parts {
		v = append(v, json.RawMessage(part))
	}
	return v
}

// state is what a history has, by name.
type state map[string]string

func (s state) apply(d *Diff) state {
	next := maps.Clone(s)
	if d.Full || next == nil {
		next = state{}
	}
	for key, v := range d.Values {
		if len(v) == 0 {
			delete(next, string(key.Kind)+"/"+key.Name)
			continue
		}
		var parts []string
		for _, part := range v {
			parts = append(parts, string(part))
		}
		next[string(key.Kind)+"/"+key.Name] = strings.Join(parts, " ")
	}
	return next
}

// A change of one of many GPUs of a node, or of a network, takes time by their number alone, not by its square.
func TestAChangeAmongManyParts(t *testing.T) {
	const many = 40_000
	h := fromOne(Limits{Age: time.Hour, Bytes: 1 << 30})
	parts := func(changed int) (v Value) {
		for i := range many {
			v = append(v, json.RawMessage(fmt.Sprintf(`{"device":"gpu-%06d","changed":%t}`, i, i == changed)))
		}
		return v
	}
	h.Commit(start, map[Key]Value{{Node, "*"}: parts(-1)})
	last := parts(7)
	began := time.Now()
	h.Commit(start.Add(time.Second), map[Key]Value{{Node, "*"}: last})
	if took := time.Since(began); took > 5*time.Second { // by its square some 15 s
		t.Errorf("it took %v", took)
	}
}

// Whatever has happened, each version that can be asked for is as it was, from wherever a browser comes; and what is older is forgotten.
func TestHistoryTellsEachVersionAsItWas(t *testing.T) {
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 0))
		h := fromOne(Limits{Age: time.Minute, Bytes: 1 << 20})
		was := map[Version]state{}
		now, current := start, state{}
		for range 200 {
			now = now.Add(time.Duration(random.IntN(3000)) * time.Millisecond)
			values := map[Key]Value{}
			next := maps.Clone(current)
			for range 1 + random.IntN(4) {
				key := Key{[]Kind{Node, Pod}[random.IntN(2)], fmt.Sprint(random.IntN(6))}
				name := string(key.Kind) + "/" + key.Name
				if random.IntN(4) == 0 {
					values[key] = nil
					delete(next, name)
					continue
				}
				a, b := fmt.Sprint(random.IntN(3)), fmt.Sprint(random.IntN(3))
				values[key] = value(a, b)
				next[name] = a + " " + b
			}
			h.Commit(now, values)
			current = next
			last, _ := h.Last()
			was[last.Version] = current
		}
		last, _ := h.Last()
		full, _ := h.Diff(0, last.Version)
		if full.Oldest <= 1 || len(full.Moments) != int(last.Version-full.Oldest)+1 {
			t.Fatalf("seed %d: versions %d to %d, %d moments", seed, full.Oldest, last.Version, len(full.Moments))
		}
		if age := now.Sub(full.Moments[1].Time); age >= time.Minute {
			t.Errorf("seed %d: the second oldest moment is %s old", seed, age)
		}
		for from := Version(0); from <= last.Version; from++ {
			for _, to := range []Version{full.Oldest, full.Oldest + Version(random.IntN(int(last.Version-full.Oldest)+1)), last.Version} {
				d, ok := h.Diff(from, to)
				if !ok || d.Full != (from < full.Oldest) || d.Version != to {
					t.Fatalf("seed %d: from %d to %d: %+v", seed, from, to, d)
				}
				if diff := cmp.Diff(was[to], was[from].apply(&d)); diff != "" {
					t.Fatalf("seed %d: from %d to %d: %s", seed, from, to, diff)
				}
			}
		}
		for _, m := range full.Moments {
			if at, _ := h.At(m.Time); at.Time != m.Time || at.Version < m.Version {
				t.Errorf("seed %d: at %s: %+v, want %+v", seed, m.Time, at, m)
			}
		}
	}
}

// fromOne is a history whose first version is 1.
func fromOne(limits Limits) *History {
	h := NewHistory(limits)
	h.first = 1
	return h
}

func TestHistoryIsBounded(t *testing.T) {
	h := fromOne(Limits{Age: time.Hour, Bytes: 10_000})
	long := strings.Repeat("x", 500)
	for i := range 1000 {
		h.Commit(start.Add(time.Duration(i)*time.Second), map[Key]Value{
			{Node, "a"}:                          value(`"`+long+`"`, fmt.Sprintf("%q", fmt.Sprint(i))), // the long part is the same
			{Node, "b"}:                          value(fmt.Sprintf("%q", long+fmt.Sprint(i))),
			{Pod, fmt.Sprintf("ns/pod-%d", i)}:   value(`{}`),
			{Pod, fmt.Sprintf("ns/pod-%d", i-1)}: nil,
		})
	}
	d, _ := h.Diff(0, 1000)
	if h.bytes > 10_000 || len(d.Moments) < 10 || len(d.Moments) > 20 || len(h.moments) != len(d.Moments) {
		t.Errorf("%d bytes, %d moments", h.bytes, len(d.Moments))
	}
	if len(h.tracks) > 2+len(d.Moments)+1 {
		t.Errorf("%d tracks: pods that are gone are kept", len(h.tracks))
	}
	if want := []Key{{Node, "a"}, {Node, "b"}, {Pod, "ns/pod-999"}}; len(d.Values) != len(want) {
		t.Errorf("%d values, want %v", len(d.Values), want)
	}
	sum := 0
	for _, track := range h.tracks {
		for _, e := range track[:len(track)-1] {
			sum += e.bytes
		}
	}
	if sum != h.bytes {
		t.Errorf("%d bytes are counted, and there are %d", h.bytes, sum)
	}
}

// What has not changed makes no version, and the clock may be set back.
func TestHistoryCommits(t *testing.T) {
	h := fromOne(Limits{Age: time.Hour, Bytes: 1 << 20})
	if _, ok := h.Diff(0, 1); ok {
		t.Error("an empty history has a version")
	}
	h.Commit(start, nil)
	first := h.Changed()
	h.Commit(start, map[Key]Value{{Node, "a"}: nil})
	select {
	case <-first:
		t.Error("nothing has changed, and it is told")
	default:
	}
	h.Commit(start.Add(-time.Hour), map[Key]Value{{Node, "a"}: value("1")})
	select {
	case <-first:
	default:
		t.Error("a change is not told")
	}
	h.Commit(start.Add(-time.Hour), map[Key]Value{{Node, "a"}: value("1")})
	d, _ := h.Diff(1, 2)
	if want := []Moment{{Version: 2, Time: start, Changes: 1}}; !slices.Equal(d.Moments, want) {
		t.Errorf("moments %v, want %v", d.Moments, want)
	}
	if at, _ := h.At(start.Add(-time.Minute)); at.Version != 1 {
		t.Errorf("before the first version it is %d", at.Version)
	}
}

// A browser whose connection ends between two pages of a change is told all of it again: it has the moments once.
func TestMomentsAreToldOnce(t *testing.T) {
	h := fromOne(Limits{Age: time.Hour, Bytes: 1 << 20})
	h.Commit(start, map[Key]Value{{Node, "a"}: value("1")})
	h.Commit(start.Add(time.Second), map[Key]Value{{Node, "a"}: value("2"), {Node, "b"}: value("1"), {Node, "c"}: value("1")})
	told := func(pages []page) (n int) {
		for _, p := range pages {
			var out bytes.Buffer
			p.write(&out, p.more)
			var read struct{ Moments [][3]int64 }
			if err := json.Unmarshal(out.Bytes(), &read); err != nil {
				t.Fatal(err)
			}
			n += len(read.Moments)
		}
		return n
	}
	last, _ := h.Last()
	diff, _ := h.Diff(last.Version-1, last.Version)
	pages := diff.pages(1)
	if first, again := told(pages[:2]), told(pages); len(pages) != 3 || first+again != 1 {
		t.Errorf("%d moments in two of %d pages, and %d when all are told again, want 1 in all", first, len(pages), again)
	}
}

// A pod of a file that has no time is sorted with the others.
func TestAPodWithoutATime(t *testing.T) {
	c := snapshottest.New(1, 1)
	pod, _ := c.Pod("a", "one", 1, 0)
	pod.CreationTimestamp = metav1.Time{}
	feed := NewFeed(NewHistory(Limits{}))
	if err := feed.Fill(c.Snapshot()); err != nil {
		t.Fatal(err)
	}
	last, _ := feed.history.Last()
	diff, _ := feed.history.Diff(0, last.Version)
	var read struct{ Created *string }
	if err := json.Unmarshal(diff.Values[Key{Pod, "a/one"}][0], &read); err != nil || read.Created == nil {
		t.Errorf("created %v, error %v", read.Created, err)
	}
}
