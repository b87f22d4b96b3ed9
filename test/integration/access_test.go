// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	coreapply "k8s.io/client-go/applyconfigurations/core/v1"
	metaapply "k8s.io/client-go/applyconfigurations/meta/v1"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

// gpuDriver is the only driver that the manifests let the node agent speak for.
const gpuDriver = "gpu.nvidia.com"

// agent is a client with the node agent's identity, on the given node or on none.
func (w *world) agent(nodeSuffix string) kubernetes.Interface {
	w.t.Helper()
	return kubernetes.NewForConfigOrDie(w.agentConfig(nodeSuffix))
}

func (w *world) agentConfig(nodeSuffix string) *rest.Config {
	w.t.Helper()
	var bound *authenticationv1.BoundObjectReference
	if nodeSuffix != "" {
		bound = &authenticationv1.BoundObjectReference{Kind: "Node", APIVersion: "v1", Name: w.nodeName(nodeSuffix)}
	}
	config, err := cluster.ServiceAccountConfig(w.ctx, "stowage-node-agent", "stowage-node-agent", bound)
	w.must(err, "getting the identity of the node agent")
	return config
}

// kubelet is a client with the identity of a node's kubelet.
func (w *world) kubelet(nodeSuffix string) kubernetes.Interface {
	w.t.Helper()
	config, err := cluster.NodeConfig(w.nodeName(nodeSuffix))
	w.must(err, "getting the identity of a kubelet")
	return kubernetes.NewForConfigOrDie(config)
}

// A node agent publishes the GPUs of its own node, and nothing else.
func TestNodeAgentWritesOnlyItsOwnSlices(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.driver = gpuDriver
	w.addNode("a")
	w.addNode("b")
	theirs := w.slice("b", gpus(h100, 1)...)
	theirs.Name += "-theirs"
	w.addSlice(theirs)
	a, unbound, kubelet := w.agent("a"), w.agent(""), w.kubelet("a")
	w.awaitPolicy(func(ctx context.Context) error {
		_, err := a.ResourceV1().ResourceSlices().Create(ctx, w.slice("b", gpus(h100, 1)...), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	})

	tests := map[string]struct {
		client  kubernetes.Interface
		change  func(*resourceapi.ResourceSlice)
		message string // of the refusal; none if the write is right
	}{
		"its own":                             {client: a},
		"another node's":                      {client: a, change: func(s *resourceapi.ResourceSlice) { *s = *w.slice("b", gpus(h100, 1)...) }, message: "may not write a ResourceSlice of node"},
		"all nodes'":                          {client: a, change: func(s *resourceapi.ResourceSlice) { s.Spec.NodeName, s.Spec.AllNodes = nil, ptr.To(true) }, message: "may not write a ResourceSlice of node ''"},
		"another driver's":                    {client: a, change: func(s *resourceapi.ResourceSlice) { s.Spec.Driver = "nic.example.com" }, message: "only of " + gpuDriver},
		"another pool's":                      {client: a, change: func(s *resourceapi.ResourceSlice) { s.Spec.Pool.Name = w.nodeName("b") }, message: "may not be of pool"},
		"a kubelet's, for its node":           {client: kubelet},
		"a kubelet's, of another node's pool": {client: kubelet, change: func(s *resourceapi.ResourceSlice) { s.Spec.Pool.Name = w.nodeName("b") }, message: "may not be of pool"},
		"a kubelet's, of another node's pool and another driver": {client: kubelet, change: func(s *resourceapi.ResourceSlice) {
			s.Spec.Driver, s.Spec.Pool.Name = "nic.example.com", w.nodeName("b")
		}},
		"an administrator's":                         {client: w.client},
		"an administrator's, of another node's pool": {client: w.client, change: func(s *resourceapi.ResourceSlice) { s.Spec.Pool.Name = w.nodeName("b") }, message: "may not be of pool"},
		"an administrator's, for all nodes":          {client: w.client, change: func(s *resourceapi.ResourceSlice) { s.Spec.NodeName, s.Spec.AllNodes = nil, ptr.To(true) }, message: "may not be of pool"},
		"without a node":                             {client: unbound, message: "not bound to a node"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			slice := w.slice("a", gpus(h100, 1)...)
			if test.change != nil {
				test.change(slice)
			}
			slice.Name = w.name + "-test"
			slices := test.client.ResourceV1().ResourceSlices()
			_, err := slices.Create(w.ctx, slice, metav1.CreateOptions{})
			if test.message != "" {
				checkRefused(t, err, test.message)
				return
			}
			if err != nil {
				t.Fatalf("creating its own slice: %v", err)
			}
			if test.client == kubelet {
				slices = w.client.ResourceV1().ResourceSlices() // the node authorizer learns of the kubelet's slice a little later
			}
			if err := slices.Delete(w.ctx, slice.Name, metav1.DeleteOptions{}); err != nil {
				t.Errorf("deleting its own slice: %v", err)
			}
		})
	}
	checkRefused(t, a.ResourceV1().ResourceSlices().Delete(w.ctx, theirs.Name, metav1.DeleteOptions{}), "may not write a ResourceSlice of node")
}

// awaitPolicy waits until the API server refuses what the admission policy forbids. No object tells when a policy
// has come into effect, so this is the one place where the tests have to poll.
func (w *world) awaitPolicy(forbidden func(context.Context) error) {
	w.t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(w.ctx, 100*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
		last = forbidden(ctx)
		return last != nil, nil
	})
	if err != nil {
		w.t.Fatalf("waiting for the admission policy: %v; last answer: %v", err, last)
	}
}

// checkRefused wants the error that says "no right": an agent that gets another one would not know that it is refused. Only the API
// server's own tests of a claim's status answer that the claim is invalid.
func checkRefused(t *testing.T, err error, message string) {
	t.Helper()
	invalid := strings.HasPrefix(message, "resourceclaims/") && apierrors.IsInvalid(err)
	if !apierrors.IsForbidden(err) && !invalid || !strings.Contains(err.Error(), message) {
		t.Errorf("got %v, want a refusal with %q", err, message)
	}
}

// A node agent reports the status of its own driver's devices in claims of its own node, and does not allocate.
func TestNodeAgentWritesOnlyItsDevicesStatus(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.driver = gpuDriver
	w.addNode("a")
	w.addNode("b")
	claim := w.allocate(w.addClaim("claim", spec(w.exactly("gpu", 1))), "a", "gpu-0")

	report := func(suffix, status string) error {
		_, err := w.agent(suffix).ResourceV1().ResourceClaims(w.name).Patch(w.ctx, claim.Name, types.MergePatchType, []byte(`{"status":`+status+`}`), metav1.PatchOptions{}, "status")
		return err
	}
	ready := fmt.Sprintf(`{"devices":[{"driver":%q,"pool":%q,"device":"gpu-0","conditions":[
		{"type":"Ready","status":"True","reason":"Test","message":"","lastTransitionTime":"2026-01-01T00:00:00Z"}]}]}`, gpuDriver, w.nodeName("a"))
	checkRefused(t, report("b", ready), "resourceclaims/driver")
	checkRefused(t, report("a", `{"allocation":null}`), "resourceclaims/binding")
	_, err := w.agent("a").ResourceV1().ResourceClaims(w.name).UpdateStatus(w.ctx, w.claim(claim.Name), metav1.UpdateOptions{})
	checkRefused(t, err, `cannot update resource "resourceclaims/status"`)
	if err := report("a", ready); err != nil {
		t.Errorf("reporting the status of its own device: %v", err)
	}

	// The agent applies its part, which needs the same rights, and leaves the rest alone.
	apply := func(suffix string) error {
		device := resourceapply.AllocatedDeviceStatus().WithDriver(gpuDriver).WithPool(w.nodeName("a")).WithDevice("gpu-0").
			WithData(runtime.RawExtension{Raw: []byte(`{"uuid":"GPU-0"}`)}).
			WithConditions(metaapply.Condition().WithType("Ready").WithStatus(metav1.ConditionFalse).WithReason("Test").WithMessage("").WithLastTransitionTime(metav1.Now()))
		config := resourceapply.ResourceClaim(claim.Name, w.name).WithUID(claim.UID).WithStatus(resourceapply.ResourceClaimStatus().WithDevices(device))
		_, err := w.agent(suffix).ResourceV1().ResourceClaims(w.name).ApplyStatus(w.ctx, config, metav1.ApplyOptions{FieldManager: gpuDriver, Force: true})
		return err
	}
	checkRefused(t, apply("b"), "resourceclaims/driver")
	if err := apply("a"); err != nil {
		t.Errorf("applying the status of its own device: %v", err)
	}
	fresh := w.claim(claim.Name)
	if len(fresh.Status.Devices) != 1 || fresh.Status.Devices[0].Conditions[0].Status != metav1.ConditionFalse || fresh.Status.Allocation == nil {
		t.Errorf("the status after that: %+v", fresh.Status)
	}
}

// A node agent writes one condition of its own Node, and nothing else of any.
func TestNodeAgentWritesOnlyItsConditionOfItsNode(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a")
	w.addNode("b")
	patch := func(client kubernetes.Interface, suffix, patch string, subresources ...string) error {
		_, err := client.CoreV1().Nodes().Patch(w.ctx, w.nodeName(suffix), types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}, subresources...)
		return err
	}
	const condition = `{"status":{"conditions":[{"type":"GPUsReady","status":"True","reason":"Test"}]}}`
	a, unbound := w.agent("a"), w.agent("")
	w.awaitPolicy(func(ctx context.Context) error { return patch(a, "b", condition, "status") })

	// Applied, as the agent does, and changed.
	for _, status := range []v1.ConditionStatus{v1.ConditionFalse, v1.ConditionTrue} {
		config := coreapply.Node(w.nodeName("a")).WithStatus(coreapply.NodeStatus().WithConditions(
			coreapply.NodeCondition().WithType("GPUsReady").WithStatus(status).WithReason("Test").WithLastTransitionTime(metav1.Now())))
		if _, err := a.CoreV1().Nodes().ApplyStatus(w.ctx, config, metav1.ApplyOptions{FieldManager: gpuDriver, Force: true}); err != nil {
			t.Errorf("applying its own condition: %v", err)
		}
	}
	for name, test := range map[string]struct {
		client       kubernetes.Interface
		node, patch  string
		subresources []string
		message      string
	}{
		"another node's":           {a, "b", condition, []string{"status"}, "may not write the status of node"},
		"without a node":           {unbound, "a", condition, []string{"status"}, "may not write the status of node"},
		"another condition":        {a, "a", `{"status":{"conditions":[{"type":"Ready","status":"False","reason":"Test"}]}}`, []string{"status"}, "may only write the condition GPUsReady"},
		"the resources":            {a, "a", `{"status":{"capacity":{"example.com/x":"7"}}}`, []string{"status"}, "may only write the conditions"},
		"the addresses":            {a, "a", `{"status":{"addresses":[{"type":"Hostname","address":"elsewhere"}]}}`, []string{"status"}, "may only write the conditions"},
		"a label, with the status": {a, "a", `{"metadata":{"labels":{"x":"y"}}}`, []string{"status"}, "may not change a node's metadata"},
		"a label":                  {a, "a", `{"metadata":{"labels":{"x":"y"}}}`, nil, "cannot patch resource \"nodes\""},
		"a taint":                  {a, "a", `{"spec":{"unschedulable":true}}`, nil, "cannot patch resource \"nodes\""},
	} {
		t.Run(name, func(t *testing.T) {
			checkRefused(t, patch(test.client, test.node, test.patch, test.subresources...), test.message)
		})
	}
}

// A node agent lists the pods of its node, as that node, to know that nobody uses a claim. It reads no others and no secrets, and changes
// none; and it does nothing else as a node.
func TestNodeAgentListsThePodsOfItsNode(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a")
	w.addNode("b")
	as := func(suffix, node string) kubernetes.Interface {
		config := w.agentConfig(suffix)
		if node != "" {
			config.Impersonate.UserName = "system:node:" + w.nodeName(node)
		}
		return kubernetes.NewForConfigOrDie(config)
	}
	list := func(client kubernetes.Interface, selector string) error {
		_, err := client.CoreV1().Pods(metav1.NamespaceAll).List(w.ctx, metav1.ListOptions{FieldSelector: selector})
		return err
	}
	ofA, ofB := "spec.nodeName="+w.nodeName("a"), "spec.nodeName="+w.nodeName("b")
	for _, node := range []string{"a", "b"} {
		if err := list(as(node, node), "spec.nodeName="+w.nodeName(node)); err != nil {
			t.Errorf("listing the pods of node %s: %v", node, err)
		}
	}
	checkRefused(t, list(as("a", ""), ofA), "cannot list resource \"pods\"")
	checkRefused(t, list(as("a", "a"), ""), "can only list/watch pods with spec.nodeName field selector")
	checkRefused(t, list(as("a", "a"), ofB), "can only list/watch pods with spec.nodeName field selector")
	checkRefused(t, list(as("a", "b"), ofB), "cannot impersonate")
	checkRefused(t, list(as("", "a"), ofA), "cannot impersonate")
	_, err := as("a", "a").CoreV1().Pods(w.name).Get(w.ctx, "pod", metav1.GetOptions{})
	checkRefused(t, err, "cannot impersonate")
	_, err = as("a", "a").CoreV1().Nodes().Get(w.ctx, w.nodeName("a"), metav1.GetOptions{})
	checkRefused(t, err, "cannot impersonate")
}

// A node agent writes events as its driver on its node, about that node and about pods, and leaves those of others alone.
func TestNodeAgentWritesOnlyItsEvents(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a")
	w.addNode("b")
	event := func(kind, name, host string) *v1.Event {
		e := &v1.Event{
			ObjectMeta:     metav1.ObjectMeta{GenerateName: "event-", Namespace: w.name},
			InvolvedObject: v1.ObjectReference{APIVersion: "v1", Kind: kind, Namespace: w.name, Name: name},
			Source:         v1.EventSource{Component: gpuDriver, Host: host}, Reason: "Test", Type: v1.EventTypeNormal,
		}
		if kind == "Node" {
			e.Namespace, e.InvolvedObject.Namespace = metav1.NamespaceDefault, ""
		}
		return e
	}
	create := func(ctx context.Context, client kubernetes.Interface, e *v1.Event) (*v1.Event, error) {
		return client.CoreV1().Events(e.Namespace).Create(ctx, e, metav1.CreateOptions{})
	}
	count := func(client kubernetes.Interface, e *v1.Event, patch string) error {
		_, err := client.CoreV1().Events(e.Namespace).Patch(w.ctx, e.Name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{})
		return err
	}
	a, unbound, nodeA, nodeB := w.agent("a"), w.agent(""), w.nodeName("a"), w.nodeName("b")
	w.awaitPolicy(func(ctx context.Context) error {
		_, err := create(ctx, a, event("Pod", "pod", nodeB))
		return err
	})
	for _, e := range []*v1.Event{event("Pod", "pod", nodeA), event("Node", nodeA, nodeA)} {
		made, err := create(w.ctx, a, e)
		if err != nil {
			t.Errorf("its event about a %s: %v", e.InvolvedObject.Kind, err)
			continue
		}
		if err := count(a, made, `{"count":2}`); err != nil {
			t.Errorf("counting it: %v", err)
		}
	}
	other := event("Pod", "pod", nodeA)
	other.Source.Component = "kubelet"
	for name, test := range map[string]struct {
		client  kubernetes.Interface
		event   *v1.Event
		message string
	}{
		"as another node":        {a, event("Pod", "pod", nodeB), "may only write events whose source is"},
		"as the kubelet":         {a, other, "may only write events whose source is"},
		"without a node":         {unbound, event("Pod", "pod", ""), "may only write events whose source is"},
		"about another node":     {a, event("Node", nodeB, nodeA), "may only write events about pods and that node"},
		"about something else's": {a, event("ResourceClaim", "claim", nodeA), "may only write events about pods and that node"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := create(w.ctx, test.client, test.event)
			checkRefused(t, err, test.message)
		})
	}
	kubelets, err := create(w.ctx, w.client, other)
	w.must(err, "writing another's event")
	checkRefused(t, count(a, kubelets, `{"count":2}`), "may only write events whose source is")
	checkRefused(t, count(a, kubelets, `{"count":2,"source":{"component":"gpu.nvidia.com"}}`), "may only write events whose source is")
}

// The scheduler has no rights that it does not need: a sample of what a takeover of it must not give.
func TestSchedulerRights(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	identity, err := schedulerIdentity()
	w.must(err, "getting the scheduler's identity")
	client := kubernetes.NewForConfigOrDie(identity)
	w.addClaim("claim", spec(w.exactly("gpu", 1)))

	_, err = client.CoreV1().Secrets(w.name).List(w.ctx, metav1.ListOptions{})
	checkRefused(t, err, "secrets")
	_, err = client.CoreV1().Pods(w.name).Create(w.ctx, w.newPod("pod"), metav1.CreateOptions{})
	checkRefused(t, err, "pods")
	_, err = client.ResourceV1().ResourceSlices().Create(w.ctx, w.slice("a", gpus(h100, 1)...), metav1.CreateOptions{})
	checkRefused(t, err, "resourceslices")
	_, err = client.CoordinationV1().Leases("kube-system").Get(w.ctx, "kube-scheduler", metav1.GetOptions{})
	checkRefused(t, err, "leases")

	// Claims for extended resources are its own, those of users are not.
	claims := client.ResourceV1().ResourceClaims(w.name)
	w.awaitPolicy(func(ctx context.Context) error {
		return claims.Delete(ctx, "claim", metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}})
	})
	checkRefused(t, claims.Delete(w.ctx, "claim", metav1.DeleteOptions{}), "only create or delete claims for extended resources")
	forged := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Name: "forged", Annotations: map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"},
	}}
	_, err = claims.Create(w.ctx, forged, metav1.CreateOptions{})
	checkRefused(t, err, "that a pod controls")
	for name, change := range map[string]func(*resourceapi.ResourceClaim){
		"the annotation": func(c *resourceapi.ResourceClaim) {
			c.Annotations = map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"}
		},
		"an owner": func(c *resourceapi.ResourceClaim) {
			c.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "pod", UID: "pod-uid", Controller: ptr.To(true)}}
		},
	} {
		changed := w.claim("claim")
		change(changed)
		_, err := claims.Update(w.ctx, changed, metav1.UpdateOptions{})
		t.Run(name, func(t *testing.T) { checkRefused(t, err, "may not change a claim's owners") })
	}
	changed := w.claim("claim")
	changed.Finalizers = append(changed.Finalizers, resourceapi.Finalizer)
	if _, err := claims.Update(w.ctx, changed, metav1.UpdateOptions{}); err != nil {
		t.Errorf("adding the finalizer: %v", err)
	}
}

// The finalizer of an allocated claim is all that keeps it from being deleted under a pod. Tenants do not remove it; the scheduler and
// administrators do.
func TestTheFinalizerOfAClaimInUseStays(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a", gpus(h100, 2)...)
	rules := []rbacv1.PolicyRule{{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceclaims"}, Verbs: []string{"*"}}}
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "tenant"}, Rules: rules}
	_, err := w.client.RbacV1().Roles(w.name).Create(w.ctx, role, metav1.CreateOptions{})
	w.must(err, "creating the tenant's role")
	account := &v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "tenant"}}
	_, err = w.client.CoreV1().ServiceAccounts(w.name).Create(w.ctx, account, metav1.CreateOptions{})
	w.must(err, "creating the tenant's service account")
	binding := &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "tenant"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "tenant"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: w.name, Name: "tenant"}},
	}
	_, err = w.client.RbacV1().RoleBindings(w.name).Create(w.ctx, binding, metav1.CreateOptions{})
	w.must(err, "binding the tenant's role")
	tenant, err := cluster.ServiceAccountConfig(w.ctx, w.name, "tenant", nil)
	w.must(err, "getting the tenant's identity")
	scheduler, err := schedulerIdentity()
	w.must(err, "getting the scheduler's identity")

	first := w.allocate(w.addClaim("first", spec(w.exactly("gpu", 1))), "a", "gpu-0").Name
	second := w.allocate(w.addClaim("second", spec(w.exactly("gpu", 1))), "a", "gpu-1").Name
	unused := w.addClaim("unused", spec(w.exactly("gpu", 1)))
	unused.Finalizers = []string{resourceapi.Finalizer, "example.com/mine"}
	_, err = w.client.ResourceV1().ResourceClaims(w.name).Update(w.ctx, unused, metav1.UpdateOptions{})
	w.must(err, "adding a finalizer")
	update := func(ctx context.Context, identity *rest.Config, name string, finalizers ...string) error {
		claim := w.claim(name)
		claim.Finalizers = finalizers
		_, err := kubernetes.NewForConfigOrDie(identity).ResourceV1().ResourceClaims(w.name).Update(ctx, claim, metav1.UpdateOptions{})
		return err
	}
	w.awaitPolicy(func(ctx context.Context) error {
		claim := w.claim(first)
		claim.Finalizers = nil
		_, err := kubernetes.NewForConfigOrDie(tenant).ResourceV1().ResourceClaims(w.name).Update(ctx, claim, metav1.UpdateOptions{DryRun: []string{metav1.DryRunAll}})
		if err != nil && !strings.Contains(err.Error(), "its finalizer") {
			return nil // the role is not in effect yet
		}
		return err
	})

	for name, tc := range map[string]struct {
		identity   *rest.Config
		claim      string
		finalizers []string
		refused    bool
	}{
		"a tenant, of an allocated claim":            {identity: tenant, claim: first, refused: true},
		"a tenant, putting another in its place":     {identity: tenant, claim: second, finalizers: []string{"example.com/mine"}, refused: true},
		"a tenant, adding its own":                   {identity: tenant, claim: second, finalizers: []string{"example.com/mine", resourceapi.Finalizer}},
		"a tenant, of a claim that is not allocated": {identity: tenant, claim: unused.Name},
	} {
		t.Run(name, func(t *testing.T) {
			err := update(w.ctx, tc.identity, tc.claim, tc.finalizers...)
			if tc.refused {
				checkRefused(t, err, "its finalizer resource.kubernetes.io/delete-protection is removed by the scheduler")
			} else if err != nil {
				t.Error(err)
			}
		})
	}
	if err := update(w.ctx, scheduler, first); err != nil {
		t.Errorf("the scheduler: %v", err)
	}
	if err := update(w.ctx, cluster.AdminConfig(), second); err != nil {
		t.Errorf("an administrator: %v", err)
	}
}
