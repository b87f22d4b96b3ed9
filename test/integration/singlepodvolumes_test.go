// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
)

// A volume for one pod at a time: the next pod waits without a device, and gets both when the first one has ended.
func TestPodWaitsForAVolumeThatAnotherPodUses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.addStorage()
	scheduler := startScheduler(t, w.name, schedulerSetup{})
	for _, node := range []string{"a", "b"} {
		w.addNode(node, gpus(h100, 1)...)
		s.reaches(node, "one")
	}
	s.addBoundVolume("data", "one", v1.ReadWriteOncePod)
	w.addTemplate("one", spec(w.exactly("gpu", 1)))
	holder := w.addPod("holder", withTemplate("one"), withVolume("data"), w.onNode("a"))
	w.awaitBound("holder")

	w.addClaim("wanted", spec(w.exactly("gpu", 1)))
	w.addPod("pod", withClaim("wanted"), withVolume("data"))
	// On a the device is missing, too, and asked for first.
	w.awaitUnschedulable("pod", "1 node(s) whose matching devices are held", "1 node(s) unavailable due to PersistentVolumeClaim with "+volumeInUse)
	if n := scheduler.probe.of("pod").reserved; n > 0 {
		t.Errorf("devices were reserved %d times for a pod whose volume is in use", n)
	}
	// The free device goes to who can use it.
	w.addPod("other", withTemplate("one"))
	w.awaitBoundTo("other", "b")

	w.endPod(holder)
	w.awaitBoundTo("pod", "a")
	if got := devices(w.claim("wanted")); len(got) != 1 {
		t.Errorf("the pod runs with devices %q", got)
	}
}

// A pod of higher priority takes the volume for one pod at a time, and a device on the same node: who is evicted are
// those that have what it needs, and no others.
func TestPreemptionForVolumeAndDevice(t *testing.T) {
	t.Parallel()
	scheduler := startScheduler(t, namePrefix(t.Name())+"scheduler", schedulerSetup{})
	tests := map[string]struct {
		setUp   func(w *world)
		victims []string
		// on is the node that the pod gets, none if it waits.
		on string
		// waits is what a pod that waits is told.
		waits string
	}{
		"one pod has both": {
			setUp: func(w *world) {
				w.run("go", middle, "a", withTemplate("one"), withVolume("data"))
				w.run("keep-a", low, "a")
				w.run("keep-b", low, "b", withTemplate("one"))
			},
			victims: []string{"go"}, on: "a",
		},
		"one pod has the volume, another one of the node the device": {
			setUp: func(w *world) {
				w.run("go-volume", middle, "a", withVolume("data"))
				w.run("go-device", middle, "a", withTemplate("one"))
				w.run("keep", low, "b", withTemplate("one"))
			},
			victims: []string{"go-device", "go-volume"}, on: "a",
		},
		"the pod with the volume has equal priority": {
			setUp: func(w *world) {
				w.run("keep-a", high, "a", withVolume("data"))
				w.run("keep-b", low, "a", withTemplate("one"))
				w.run("keep-c", low, "b", withTemplate("one"))
			},
			waits: volumeInUse,
		},
		"the pod with the device beside the volume has equal priority": {
			setUp: func(w *world) {
				w.run("keep-a", low, "a", withVolume("data"))
				w.run("keep-b", high, "a", withTemplate("one"))
				w.run("keep-c", high, "b", withTemplate("one"))
			},
			waits: "node(s) whose matching devices are held by other claims",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := worldOf(t, scheduler)
			s := w.addStorage()
			w.addGPUs(1)
			for _, node := range []string{"a", "b"} {
				s.reaches(node, "one")
			}
			s.addBoundVolume("data", "one", v1.ReadWriteOncePod)
			tc.setUp(w)
			before := w.podNames()
			w.addPod("preemptor", withTemplate("one"), withVolume("data"), w.withPriority(high))
			if tc.on == "" {
				w.awaitUnschedulable("preemptor", tc.waits)
			} else {
				w.awaitBoundTo("preemptor", tc.on)
			}
			want := slices.DeleteFunc(append(before, "preemptor"), func(name string) bool { return slices.Contains(tc.victims, name) })
			slices.Sort(want)
			if diff := cmp.Diff(want, w.podNames()); diff != "" {
				t.Errorf("pods that are left (-want +got):\n%s", diff)
			}
		})
	}
}
