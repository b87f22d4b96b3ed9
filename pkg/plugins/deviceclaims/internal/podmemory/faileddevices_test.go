// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podmemory

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"stowage.dev/stowage/pkg/usage"
)

func TestFailuresAreBounded(t *testing.T) {
	e := newFailedDevices(corelisters.NewPodLister(cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)))
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "p", UID: "p-uid"}}
	id := func(i int) usage.DeviceID { return usage.DeviceID{Device: fmt.Sprint(i)} }
	for i := range maxFailedDevices {
		e.Add(p, "n", []usage.DeviceID{id(i)})
	}
	e.Add(p, "n", []usage.DeviceID{id(0), id(-1)})
	got := e.Of(p.UID).Devices
	if len(got) != maxFailedDevices {
		t.Errorf("%d devices are remembered, want %d", len(got), maxFailedDevices)
	}
	if diff := cmp.Diff([]usage.DeviceID{id(2), id(0), id(-1)}, []usage.DeviceID{got[0], got[len(got)-2], got[len(got)-1]}); diff != "" {
		t.Errorf("first and last devices remembered (-want +got):\n%s", diff)
	}
	e.Relax(p.UID)
	if f := e.Of(p.UID); f == nil || f.TooOften("n") || len(f.Devices) != maxFailedDevices {
		t.Errorf("first the nodes are forgotten, got %v", f)
	}
	e.Relax(p.UID)
	if f := e.Of(p.UID); f != nil {
		t.Errorf("then the devices, got %v", f)
	}
	e.Relax(p.UID)
}
