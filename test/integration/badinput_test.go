// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// CEL that does not compile never gets as far as the scheduler: the API server refuses it, and says where.
func TestSelectorThatDoesNotCompileIsRefusedByTheAPI(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for name, expression := range map[string]string{
		"syntax":       `device.driver ==`,
		"unknown name": `gadget.driver == "x"`,
		"not a bool":   `device.driver`,
	} {
		claim := &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Name: "bad"},
			Spec:       spec(w.exactly("gpu", 1, expression)),
		}
		if _, err := w.client.ResourceV1().ResourceClaims(w.name).Create(w.ctx, claim, metav1.CreateOptions{}); !apierrors.IsInvalid(err) {
			t.Errorf("%s: creating the claim: %v, want it to be invalid", name, err)
		}
		class := &resourceapi.DeviceClass{
			ObjectMeta: metav1.ObjectMeta{Name: w.name + "-bad"},
			Spec:       resourceapi.DeviceClassSpec{Selectors: w.selectors(expression)},
		}
		if _, err := w.client.ResourceV1().DeviceClasses().Create(w.ctx, class, metav1.CreateOptions{}); !apierrors.IsInvalid(err) {
			t.Errorf("%s: creating the class: %v, want it to be invalid", name, err)
		}
	}
}

// What is wrong with one node does not keep a pod from another; where no other is left, the pod says what is wrong.
func TestTroubleOnOneNode(t *testing.T) {
	t.Parallel()
	s := startScheduler(t, "one-node", schedulerSetup{})

	tests := map[string]struct {
		// trouble makes the node "bad", which would be fine otherwise.
		trouble func(w *world)
		claim   func(w *world) resourceapi.ResourceClaimSpec
		message []string
	}{
		"CEL that fails at run time": {
			trouble: func(w *world) {
				w.addNode("bad", gpus(h100, 1, func(_ int, d *resourceapi.Device) { delete(d.Attributes, "productName") })...)
			},
			claim:   func(w *world) resourceapi.ResourceClaimSpec { return spec(w.exactly("gpu", 1, byProduct(h100))) },
			message: []string{"productName"},
		},
		"CEL that fails at run time, all devices": {
			trouble: func(w *world) {
				w.addNode("bad", gpus(h100, 1, func(_ int, d *resourceapi.Device) { delete(d.Attributes, "productName") })...)
			},
			claim: func(w *world) resourceapi.ResourceClaimSpec {
				request := w.all("gpu")
				request.Exactly.Selectors = w.selectors(byProduct(h100))
				return spec(request)
			},
			message: []string{"productName"},
		},
		"incomplete pool": {
			trouble: func(w *world) {
				w.addNode("bad")
				slice := w.slice("bad", gpus(h100, 1)...)
				slice.Spec.Pool.ResourceSliceCount = 2
				w.addSlice(slice)
			},
			claim:   func(w *world) resourceapi.ResourceClaimSpec { return spec(w.exactly("gpu", 1)) },
			message: []string{"incomplete"},
		},
		"incomplete pool, all devices": {
			trouble: func(w *world) {
				w.addNode("bad")
				slice := w.slice("bad", gpus(h100, 1)...)
				slice.Spec.Pool.ResourceSliceCount = 2
				w.addSlice(slice)
			},
			claim:   func(w *world) resourceapi.ResourceClaimSpec { return spec(w.all("gpu")) },
			message: []string{"incomplete"},
		},
		"pool with one device twice": {
			trouble: func(w *world) {
				w.addNode("bad")
				for _, part := range []string{"-1", "-2"} {
					slice := w.slice("bad", gpus(h100, 1)...)
					slice.Name += part
					slice.Spec.Pool.ResourceSliceCount = 2
					w.addSlice(slice)
				}
			},
			claim:   func(w *world) resourceapi.ResourceClaimSpec { return spec(w.exactly("gpu", 1)) },
			message: []string{"gpu-0"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := worldOf(t, s)
			test.trouble(w)
			w.addClaim("first", test.claim(w))
			w.addPod("first", withClaim("first"))
			pod := w.awaitUnschedulable("first", test.message...)
			w.awaitEvent(pod, test.message...)

			// A good node comes: the pod is woken and scheduled there.
			w.addNode("good", gpus(h100, 1)...)
			w.awaitBoundTo("first", "good")
		})
	}
}
