// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package plugins_test

import (
	"context"
	"testing"

	v1 "k8s.io/api/core/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/features"
	internalqueue "k8s.io/kubernetes/pkg/scheduler/backend/queue"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/metrics"
	"k8s.io/utils/ptr"
)

// kube-scheduler logs an error when the failure of a binding is noted and the pod "is already present in" a queue. That is a race of its
// own, with any plugin whose PreBind fails:
//
//   - schedule_one.go, bindingCycle: Done, before PreBind. From here on the queue does not know the pod.
//   - eventhandlers.go, updatePodInSchedulingQueue: updates of the pod are left out as long as it is assumed.
//   - schedule_one.go, handleBindingCycleError: ForgetPod. From here on it is not assumed.
//   - eventhandlers.go: an update of the pod. It comes with nearly every attempt, because bindingCycle has written the node as the pod's
//     nominated one just before PreBind. Update finds the pod nowhere and adds it.
//   - schedule_one.go, handleSchedulingFailure: AddUnschedulablePodIfNotPresent.
//
// Waking a pod (Activate) adds none that the queue does not know. If this test fails, upstream has mended it, and the integration tests
// need not leave the line out any more.
func TestUpstreamsQueueAddsAPodWhoseBindingFails(t *testing.T) {
	metrics.Register()
	updated := func(ctx context.Context, queue internalqueue.SchedulingQueue, pod, nominated *v1.Pod) {
		queue.Update(ctx, pod, nominated)
	}
	activated := func(ctx context.Context, queue internalqueue.SchedulingQueue, pod, _ *v1.Pod) {
		queue.Activate(klog.FromContext(ctx), map[string]*v1.Pod{"default/p": pod})
	}
	for _, tc := range []struct {
		name      string
		done      bool // the binding has begun
		meanwhile func(ctx context.Context, queue internalqueue.SchedulingQueue, pod, nominated *v1.Pod)
		want      string
	}{
		{"updated while it is bound", true, updated, "Pod default/p is already present in the active queue"},
		{"updated while a node is chosen", false, updated, ""},
		{"woken while it is bound", true, activated, ""},
		{"woken while a node is chosen", false, activated, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			logger, ctx := ktesting.NewTestContext(t)
			queue := internalqueue.NewTestQueue(ctx, func(a, b fwk.QueuedEntityInfo) bool { return false })
			pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "p", ResourceVersion: "1"}}
			nominated := pod.DeepCopy()
			nominated.ResourceVersion, nominated.Status.NominatedNodeName = "2", "a"

			queue.Add(ctx, pod)
			popped, err := queue.Pop(logger)
			if err != nil {
				t.Fatal(err)
			}
			if tc.done {
				queue.Done(pod.UID)
			}
			tc.meanwhile(ctx, queue, pod, nominated)
			err = queue.AddUnschedulablePodIfNotPresent(logger, popped.(*framework.QueuedPodInfo), queue.SchedulingCycle())
			if got := message(err); got != tc.want {
				t.Errorf("noting the failure says %q, want %q", got, tc.want)
			}
		})
	}
}

// A pod of a group whose binding fails is added to the queue like a new one, without the pause that other pods make: scheduling_queue.go,
// addUnschedulablePodGroupMember. So the plugin makes one. If this test fails, upstream has mended it, and the plugin need not.
func TestUpstreamsQueueTriesAMemberAgainAtOnce(t *testing.T) {
	metrics.Register()
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.GenericWorkload, true)
	for name, group := range map[string]*v1.PodSchedulingGroup{"alone": nil, "a member": {PodGroupName: ptr.To("g")}} {
		t.Run(name, func(t *testing.T) {
			logger, ctx := ktesting.NewTestContext(t)
			queue := internalqueue.NewTestQueue(ctx, func(a, b fwk.QueuedEntityInfo) bool { return false })
			pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "p"}, Spec: v1.PodSpec{SchedulingGroup: group}}
			queue.AddPodGroup(logger, &schedulingapi.PodGroup{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "g", UID: "g"}})
			queue.Add(ctx, pod)
			popped, err := queue.Pop(logger)
			if err != nil {
				t.Fatal(err)
			}
			var info *framework.QueuedPodInfo
			switch entity := popped.(type) {
			case *framework.QueuedPodInfo:
				info = entity
			case *framework.QueuedPodGroupInfo:
				entity.ForEachPodInfo(func(member *framework.QueuedPodInfo) bool { info = member; return false })
				if err := queue.AddAttemptedPodGroupIfNeeded(logger, entity, queue.SchedulingCycle(), fwk.NewStatus(fwk.Success)); err != nil {
					t.Fatal(err)
				}
			}
			queue.Done(pod.UID) // its binding begins
			if err := queue.AddUnschedulablePodIfNotPresent(logger, info, queue.SchedulingCycle()); err != nil {
				t.Fatal(err)
			}
			if active := len(queue.PodsInActiveQ()) > 0; active != (group != nil) {
				t.Errorf("in the active queue: %t, want %t", active, group != nil)
			}
		})
	}
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
