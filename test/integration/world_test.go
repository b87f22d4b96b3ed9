// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"regexp"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/internal/localcluster"
)

// worldLabel stands on a world's nodes. Its pods select by it, so that no test sees another one's nodes.
const worldLabel = "stowage.dev/world"

// patience is how long a test waits for one thing. What works takes a fraction of a second on an idle machine.
const patience = 2 * time.Minute

// world is what one test has for itself in the shared cluster. Names of cluster-wide objects begin with its name.
type world struct {
	t      *testing.T
	ctx    context.Context // ends with the test
	client kubernetes.Interface

	name          string // of the namespace and, unless the test says otherwise, of the scheduler profile
	driver        string // of the devices
	class         string // selects all devices of the driver
	schedulerName string // of new pods
	followed      bool   // at the end of the test, see followAdviceAtTheEnd
}

// newWorld makes a namespace and a class for the devices of a driver of its own.
func newWorld(t *testing.T) *world {
	t.Helper()
	return newWorldIn(t, cluster)
}

// newWorldIn makes a world in a cluster of the test's own.
func newWorldIn(t *testing.T, cluster *localcluster.Cluster) *world {
	t.Helper()
	w := &world{t: t, ctx: t.Context(), client: cluster.AdminClient()}
	w.name = namePrefix(t.Name()) + rand.String(5)
	w.must(cluster.CreateNamespace(w.ctx, w.name), "making a world")
	w.schedulerName, w.driver, w.class = w.name, w.name+".test.example", w.name
	w.addClass(w.class, `device.driver == "$DRIVER"`)
	t.Cleanup(func() {
		if t.Failed() {
			w.dump()
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := w.client.CoreV1().Pods(w.name).DeleteCollection(ctx,
			metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}, metav1.ListOptions{}); err != nil {
			t.Errorf("deleting the pods of %s: %v", w.name, err)
		}
	})
	return w
}

// worldOf makes a world whose pods are for a scheduler that other worlds use, too.
func worldOf(t *testing.T, s *scheduler) *world {
	t.Helper()
	w := newWorld(t)
	w.schedulerName = s.name
	return w
}

var notForNames = regexp.MustCompile(`[^a-z0-9]+`)

// namePrefix turns a test's name into the beginning of a namespace's name that leaves room for suffixes.
func namePrefix(test string) string {
	name := test[strings.LastIndex(test, "/")+1:]
	name = strings.TrimPrefix(strings.ToLower(name), "test")
	name = strings.Trim(notForNames.ReplaceAllString(name, "-"), "-")
	if len(name) > 24 {
		name = strings.Trim(name[:24], "-")
	}
	return "w-" + name + "-"
}

func (w *world) nodeName(suffix string) string { return w.name + "-" + suffix }

// must ends the test on an error.
func (w *world) must(err error, doing string, args ...any) {
	w.t.Helper()
	if err != nil {
		w.t.Fatalf(doing+": %v", append(args, err)...)
	}
}

// cleanUp deletes an object that may be gone already.
func (w *world) cleanUp(remove func(context.Context, string, metav1.DeleteOptions) error, name string) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := remove(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		w.t.Errorf("deleting %s: %v", name, err)
	}
}

// expand puts the names of the world into an expression.
func (w *world) expand(s string) string {
	return strings.NewReplacer("$DRIVER", w.driver, "$CLASS", w.class).Replace(s)
}

func (w *world) selectors(expressions ...string) []resourceapi.DeviceSelector {
	var selectors []resourceapi.DeviceSelector
	for _, e := range expressions {
		selectors = append(selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: w.expand(e)}})
	}
	return selectors
}

// exactly is a request for n devices of the world's class.
func (w *world) exactly(name string, n int64, selectors ...string) resourceapi.DeviceRequest {
	return resourceapi.DeviceRequest{Name: name, Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: w.class,
		AllocationMode:  resourceapi.DeviceAllocationModeExactCount,
		Count:           n,
		Selectors:       w.selectors(selectors...),
	}}
}

// oneOf is a request for a device of the first product that is available.
func (w *world) oneOf(name string, products ...product) resourceapi.DeviceRequest {
	request := resourceapi.DeviceRequest{Name: name}
	for _, p := range products {
		request.FirstAvailable = append(request.FirstAvailable, resourceapi.DeviceSubRequest{
			Name:            notForNames.ReplaceAllString(strings.ToLower(p.architecture), "-"),
			DeviceClassName: w.class,
			Selectors:       w.selectors(byProduct(p)),
		})
	}
	return request
}

// byProduct is a selector for one product.
func byProduct(p product) string {
	return `device.attributes["$DRIVER"].productName == "` + p.name + `"`
}

func spec(requests ...resourceapi.DeviceRequest) resourceapi.ResourceClaimSpec {
	return resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: requests}}
}

// addClaim makes a claim of its own, owned by nobody.
func (w *world) addClaim(name string, spec resourceapi.ResourceClaimSpec) *resourceapi.ResourceClaim {
	w.t.Helper()
	claim, err := w.client.ResourceV1().ResourceClaims(w.name).Create(w.ctx, &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       spec,
	}, metav1.CreateOptions{})
	w.must(err, "creating claim %s", name)
	return claim
}

// addTemplate makes a template, from which each pod that names it gets a claim.
func (w *world) addTemplate(name string, spec resourceapi.ResourceClaimSpec) {
	w.t.Helper()
	_, err := w.client.ResourceV1().ResourceClaimTemplates(w.name).Create(w.ctx, &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       resourceapi.ResourceClaimTemplateSpec{Spec: spec},
	}, metav1.CreateOptions{})
	w.must(err, "creating claim template %s", name)
}

// allocate gives a claim a device as some other scheduler would have, unreserved.
func (w *world) allocate(claim *resourceapi.ResourceClaim, nodeSuffix string, devices ...string) *resourceapi.ResourceClaim {
	w.t.Helper()
	claim = claim.DeepCopy()
	claim.Finalizers = append(claim.Finalizers, resourceapi.Finalizer)
	claim, err := w.client.ResourceV1().ResourceClaims(w.name).Update(w.ctx, claim, metav1.UpdateOptions{})
	w.must(err, "adding the finalizer to claim %s", claim.Name)
	claim.Status.Allocation = &resourceapi.AllocationResult{NodeSelector: onlyNode(w.nodeName(nodeSuffix))}
	for _, device := range devices {
		claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results,
			resourceapi.DeviceRequestAllocationResult{
				Request: claim.Spec.Devices.Requests[0].Name,
				Driver:  w.driver, Pool: w.nodeName(nodeSuffix), Device: device,
			})
	}
	claim, err = w.client.ResourceV1().ResourceClaims(w.name).UpdateStatus(w.ctx, claim, metav1.UpdateOptions{})
	w.must(err, "allocating claim %s", claim.Name)
	return claim
}

// onlyNode is the node selector of an allocation of devices of one node.
func onlyNode(name string) *v1.NodeSelector {
	return &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
		MatchFields: []v1.NodeSelectorRequirement{{
			Key: metav1.ObjectNameField, Operator: v1.NodeSelectorOpIn, Values: []string{name},
		}},
	}}}
}
