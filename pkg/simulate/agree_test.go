// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"
	kubescheduler "k8s.io/kubernetes/pkg/scheduler"

	"stowage.dev/stowage/pkg/plugins"
	"stowage.dev/stowage/pkg/simulate"
	"stowage.dev/stowage/pkg/snapshot"
	"stowage.dev/stowage/pkg/snapshot/snapshottest"
	"stowage.dev/stowage/test/liveness/memoryapi"
)

// randomCluster has three nodes of four GPUs, of which some are held or tainted, and a pod that waits. Running pods have
// half the priorities
// that the pod may have.
func randomCluster(r *rand.Rand) (*snapshottest.Cluster, *v1.Pod) {
	c := snapshottest.New(3, 4)
	for node := range 3 {
		free := r.Perm(4)
		for n := 0; len(free) > 0; n++ {
			take := min(len(free), 1+r.IntN(2))
			switch r.IntN(4) {
			case 0:
			case 1:
				c.Taint(node, free[0], "ill")
			default:
				c.Run(fmt.Sprintf("team-%d", r.IntN(2)), fmt.Sprintf("run-%d-%d", node, n), int32(10*r.IntN(2)), node, free[:take]...)
			}
			free = free[take:]
		}
	}
	pod, claim := c.Pod("team-0", "waits", 1+r.IntN(4), int32(5*r.IntN(4)))
	switch r.IntN(5) {
	case 0:
		claim.Spec.Devices.Requests[0].Exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf(`device.attributes["resource.kubernetes.io"].numaNode == %d`, r.IntN(2)),
		}}}
	case 1:
		pod.Spec.NodeSelector = map[string]string{v1.LabelHostname: fmt.Sprintf("worker-%d", r.IntN(4))}
	case 2:
		pod.Spec.PreemptionPolicy = new(v1.PreemptionPolicy)
		*pod.Spec.PreemptionPolicy = v1.PreemptNever
	case 3:
		byExtendedResource(c, pod)
	}
	return c, pod
}

// A pod of a random cluster is placed exactly if the scheduler binds it, and evicts as many as the scheduler. What is proposed as release
// admits it.
func TestItAgreesWithTheScheduler(t *testing.T) {
	clusters := 40
	if testing.Short() {
		clusters = 10
	}
	fits, evicts, released, byResource := 0, 0, 0, 0
	for seed := range clusters {
		c, pod := randomCluster(rand.New(rand.NewPCG(uint64(seed), 1)))
		byResource += 1 - len(pod.Spec.ResourceClaims)
		why, err := simulate.Explain(t.Context(), &c.Objects, pod.Namespace, pod.Name, simulate.Options{Seed: uint64(seed)})
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		out := why.Outcome
		node, victims := schedule(t, &c.Objects, pod)
		switch {
		case (node != "") != (out.Node != ""):
			t.Errorf("seed %d: the scheduler places the pod on %q, the simulation on %q: %s", seed, node, out.Node, out.Reason)
		case victims != len(out.Victims):
			t.Errorf("seed %d: the scheduler evicts %d pods, the simulation %v", seed, victims, out.Victims)
		}
		if out.Node != "" {
			fits++
			continue
		}
		evicts += min(1, len(out.Victims))
		if e := out.Explanation; e != nil && len(e.Holders) > 0 {
			released++
			if diff := admits(t, c, pod, e.Holders[0].Node, func(claim *resourceapi.ResourceClaim) bool {
				for _, holder := range e.Holders[0].Release {
					if holder.UID == claim.UID {
						return true
					}
				}
				return false
			}); diff != "" {
				t.Errorf("seed %d: %s", seed, diff)
			}
		}
	}
	if fits == 0 || evicts == 0 || released == 0 || byResource == 0 {
		t.Errorf("%d pods fit, %d evict, %d are told of a release, %d ask by an extended resource: this proves too little", fits, evicts,
			released, byResource)
	}
}

// admits says what is wrong with a proposed release: it is not enough, or a part of it is.
func admits(t *testing.T, c *snapshottest.Cluster, pod *v1.Pod, node string, leaves func(*resourceapi.ResourceClaim) bool) string {
	t.Helper()
	change := simulate.NewChange(&c.Objects)
	for _, claim := range c.ResourceClaims {
		if leaves(claim) {
			if err := change.Delete(claim.Namespace, claim.Name); err != nil { // pod and claim have one name
				t.Fatal(err)
			}
		}
	}
	outcomes, err := simulate.Place(t.Context(), change, []*v1.Pod{pod}, simulate.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if outcomes[0].Node != node {
		return fmt.Sprintf("with what was proposed for %s the pod gets %q: %s", node, outcomes[0].Node, outcomes[0].Reason)
	}
	return ""
}

// schedule has a real scheduler, on an API in memory, try the pod, and returns its node and how many it evicts.
func schedule(t *testing.T, objects *snapshot.Objects, pod *v1.Pod) (node string, victims int) {
	t.Helper()
	api := memoryapi.New()
	client := api.Client("user")
	// The API makes new UIDs: references follow.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	create(ctx, t, client, objects)
	config, err := options.LoadConfigFromFile(klog.Background(), "../../manifests/scheduler-config/second-scheduler.yaml")
	if err != nil {
		t.Fatal(err)
	}
	factory := kubescheduler.NewInformerFactory(api.Client("scheduler"), 0, nil)
	dynamics := dynamicinformer.NewDynamicSharedInformerFactory(dynamic.NewForConfigOrDie(api.Config("scheduler")), 0)
	set := plugins.NewSet()
	sched, err := kubescheduler.New(ctx, api.Client("scheduler"), factory, dynamics,
		func(string) events.EventRecorderLogger { return silent{} },
		kubescheduler.WithComponentConfigVersion(config.APIVersion), kubescheduler.WithProfiles(config.Profiles...),
		kubescheduler.WithFrameworkOutOfTreeRegistry(set.Registry()))
	if err != nil {
		t.Fatal(err)
	}
	if err := set.Adopt(sched); err != nil {
		t.Fatal(err)
	}
	factory.Start(ctx.Done())
	dynamics.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	if err := sched.WaitForHandlersSync(ctx); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); sched.Run(ctx) }()
	defer func() { cancel(); <-done; factory.Shutdown(); dynamics.Shutdown() }()
	running := 0
	for _, p := range objects.Pods {
		if p.Spec.NodeName != "" {
			running++
		}
	}
	watch, err := client.CoreV1().Pods(pod.Namespace).Watch(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()
	timeout := time.After(time.Minute)
	for {
		select {
		case event := <-watch.ResultChan():
			now, ok := event.Object.(*v1.Pod)
			if !ok || now.Name != pod.Name {
				continue
			}
			refused := slices.ContainsFunc(now.Status.Conditions, func(c v1.PodCondition) bool {
				return c.Type == v1.PodScheduled && c.Status == v1.ConditionFalse && c.Reason == v1.PodReasonUnschedulable
			})
			if now.Spec.NodeName == "" && !refused {
				continue
			}
			list, err := client.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			left := 0
			for _, p := range list.Items {
				if p.Name != pod.Name && p.DeletionTimestamp == nil {
					left++
				}
			}
			return now.Spec.NodeName, running - left
		case <-timeout:
			t.Fatal("the scheduler has said nothing of the pod for a minute")
		}
	}
}

// create writes the objects, with the UIDs that the API gives.
func create(ctx context.Context, t *testing.T, client kubernetes.Interface, objects *snapshot.Objects) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, class := range objects.DeviceClasses {
		_, err := client.ResourceV1().DeviceClasses().Create(ctx, fresh(class.DeepCopy()), metav1.CreateOptions{})
		must(err)
	}
	for _, node := range objects.Nodes {
		made, err := client.CoreV1().Nodes().Create(ctx, fresh(node.DeepCopy()), metav1.CreateOptions{})
		must(err)
		made.Status = node.Status
		_, err = client.CoreV1().Nodes().UpdateStatus(ctx, made, metav1.UpdateOptions{})
		must(err)
	}
	for _, slice := range objects.ResourceSlices {
		_, err := client.ResourceV1().ResourceSlices().Create(ctx, fresh(slice.DeepCopy()), metav1.CreateOptions{})
		must(err)
	}
	for i, pod := range objects.Pods {
		if i == len(objects.ResourceClaims) { // it asks by an extended resource
			_, err := client.CoreV1().Pods(pod.Namespace).Create(ctx, fresh(pod.DeepCopy()), metav1.CreateOptions{})
			must(err)
			continue
		}
		claim := objects.ResourceClaims[i].DeepCopy()
		status := claim.Status.DeepCopy()
		claim.Status = resourceapi.ResourceClaimStatus{}
		made, err := client.ResourceV1().ResourceClaims(claim.Namespace).Create(ctx, fresh(claim), metav1.CreateOptions{})
		must(err)
		newPod, err := client.CoreV1().Pods(pod.Namespace).Create(ctx, fresh(pod.DeepCopy()), metav1.CreateOptions{})
		must(err)
		newPod.Status = pod.Status
		newPod, err = client.CoreV1().Pods(pod.Namespace).UpdateStatus(ctx, newPod, metav1.UpdateOptions{})
		must(err)
		if status.Allocation == nil {
			continue
		}
		status.ReservedFor[0].UID = newPod.UID
		made.Status = *status
		_, err = client.ResourceV1().ResourceClaims(claim.Namespace).UpdateStatus(ctx, made, metav1.UpdateOptions{})
		must(err)
	}
}

func fresh[T metav1.Object](object T) T {
	object.SetUID("")
	object.SetResourceVersion("")
	return object
}

// Equal input gives equal answers, with choices among equal nodes and victims.
func TestItRepeatsItself(t *testing.T) {
	c := snapshottest.Full(6)
	c.Pod("team-0", "one", 1, 0)
	c.Pod("team-0", "urgent", 2, 100)
	c.Pod("team-0", "many", 6, 0)
	place := func(seed uint64) []*simulate.Outcome {
		change := simulate.NewChange(&c.Objects)
		outcomes, err := simulate.Place(t.Context(), change, simulate.Waiting(&change.Objects), simulate.Options{Seed: seed})
		if err != nil {
			t.Fatal(err)
		}
		return outcomes
	}
	first := place(1)
	for range 3 {
		if diff := cmp.Diff(first, place(1), cmpopts.IgnoreUnexported(simulate.Outcome{})); diff != "" {
			t.Fatal(diff)
		}
	}
	if len(first[0].Victims) != 1 || first[0].Node == "" || first[1].Pod+first[2].Pod != "manyone" || first[1].Node != "" ||
		first[2].Node == "" {
		t.Errorf("%+v %+v %+v", first[0], first[1], first[2])
	}
	empty := snapshottest.New(4, 2)
	pod, _ := empty.Pod("team-0", "one", 1, 0)
	nodes := map[string]bool{}
	for seed := range uint64(8) {
		why, err := simulate.Explain(t.Context(), &empty.Objects, pod.Namespace, pod.Name, simulate.Options{Seed: seed})
		if err != nil {
			t.Fatal(err)
		}
		nodes[why.Outcome.Node] = true
	}
	if len(nodes) < 2 {
		t.Error("the seed chooses nothing")
	}
}

// Manifests become pods with claims; what cannot be placed, or refers to what is not there, is named.
func TestManifests(t *testing.T) {
	const template = `
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: two}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com, count: 2}}]}}}
`
	const job = `
apiVersion: batch/v1
kind: Job
metadata: {name: train}
spec:
  parallelism: 3
  template:
    spec:
      restartPolicy: Never
      resourceClaims: [{name: gpu, resourceClaimTemplateName: two}]
      containers: [{name: main, image: x, resources: {claims: [{name: gpu}]}}]
`
	c := snapshottest.New(1, 4)
	change := simulate.NewChange(&c.Objects)
	pods, err := change.Apply(strings.NewReader(job+"---"+template), "team-a")
	if err != nil {
		t.Fatal(err)
	}
	outcomes, err := simulate.Place(t.Context(), change, pods, simulate.Options{})
	if err != nil {
		t.Fatal(err)
	}
	placed := 0
	for _, out := range outcomes {
		if out.Node != "" && len(out.Devices) == 2 {
			placed++
		}
	}
	if len(outcomes) != 3 || placed != 2 {
		t.Errorf("%d pods, %d placed, want 2 of 3", len(outcomes), placed)
	}
	if len(c.Pods) != 0 || len(c.ResourceClaims) != 0 {
		t.Error("the original has changed")
	}
	for name, tc := range map[string]struct{ manifest, want string }{
		"no template": {job, "pod team-a/train-0: spec.resourceClaims gpu: there is no ResourceClaimTemplate team-a/two"},
		"another kind": {
			"apiVersion: policy/v1\nkind: PodDisruptionBudget\nmetadata: {name: a}\n",
			"document 1: PodDisruptionBudget of policy/v1: cannot be placed",
		},
		"a kind of an operator": {
			"apiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n---\napiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: a}\n",
			"document 2: PyTorchJob of kubeflow.org/v1: cannot be placed",
		},
		"no kind":         {"a: b", "document 1: "},
		"too many":        {strings.ReplaceAll(job, "parallelism: 3", "parallelism: 100000"), "100000 replicas: want 0 to 10000"},
		"no such class":   {"apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {priorityClassName: x, containers: [{name: c}]}\n", "there is no PriorityClass x"},
		"not YAML at all": {"{", "document 1: "},
	} {
		if _, err := simulate.NewChange(&c.Objects).Apply(strings.NewReader(tc.manifest), "team-a"); err == nil ||
			!strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v, want %q", name, err, tc.want)
		}
	}
}

// What a List has is in the namespace of the command, too, and a class of the file gives its pods their priority.
func TestListOfManifests(t *testing.T) {
	const list = `
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Pod, metadata: {name: one}, spec: {priorityClassName: high, containers: [{name: main, image: x}]}}
- {apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: high}, value: 7}
`
	c := snapshottest.New(1, 4)
	change := simulate.NewChange(&c.Objects)
	pods, err := change.Apply(strings.NewReader(list), "team-a")
	if err != nil {
		t.Fatal(err)
	}
	if len(pods) != 1 || pods[0].Namespace != "team-a" || *pods[0].Spec.Priority != 7 {
		t.Errorf("pods %v", pods)
	}
}

// A drained node's pods are placed elsewhere, an added node takes what waits, and what is not there is named.
func TestChanges(t *testing.T) {
	c := snapshottest.New(2, 2)
	pod, claim := c.Run("a", "job", 0, 0, 0, 1)
	pod.OwnerReferences = []metav1.OwnerReference{{Kind: "Job", Name: "job", Controller: new(true)}}
	template := &resourceapi.ResourceClaimTemplate{Spec: resourceapi.ResourceClaimTemplateSpec{Spec: claim.Spec}}
	template.Namespace, template.Name = "a", "two"
	c.ResourceClaimTemplates = append(c.ResourceClaimTemplates, template)
	pod.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &template.Name}}
	pod.Status.ResourceClaimStatuses = []v1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: &claim.Name}}
	claim.OwnerReferences = []metav1.OwnerReference{{Kind: "Pod", Name: pod.Name, UID: pod.UID, Controller: new(true)}}
	c.Run("a", "other", 0, 1, 0)

	try := func(add int) string {
		change := simulate.NewChange(&c.Objects)
		if add > 0 {
			if err := change.AddNodes("p5", add); err != nil {
				t.Fatal(err)
			}
		}
		pods, err := change.Drain("worker-0")
		if err != nil {
			t.Fatal(err)
		}
		outcomes, err := simulate.Place(t.Context(), change, pods, simulate.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(len(outcomes), " ", outcomes[0].Node)
	}
	if got := try(0); got != "1 " {
		t.Errorf("drained: %s, want no place", got)
	}
	if got := try(1); got != "1 added-p5-0" {
		t.Errorf("drained, with a node more: %s", got)
	}
	change := simulate.NewChange(&c.Objects)
	_, drained := change.Drain("x")
	for want, err := range map[string]error{
		"pod a/x: there is none": change.Delete("a",
			"x"), "node x: there is none": drained, "node profile x: neither": change.AddNodes("x", 1),
		"node profile p5: Invalid value: 0": change.AddNodes("p5", 0),
	} {
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("error %v, want %s", err, want)
		}
	}
}
