// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/controller/resourceclaim"
	"k8s.io/kubernetes/pkg/controller/scheduling/podgroupprotection"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/test/liveness/memoryapi"
)

const (
	controllerName = "kube-controller-manager"
	attacherName   = "attacher"
)

// lookAgain is how often controllers look at everything again. kube-controller-manager does every 12 to 24 hours: only then it finds that a
// pod has ended of which it never heard, because a watch begun anew told neither of its beginning nor of its end. It is shorter than quiet.
const lookAgain = 30 * time.Second

// controllers are who else acts in a cluster: kube-controller-manager's controllers for claims and for groups, the real ones; the garbage
// collector, which deletes the claims of pods and groups that are gone; kubelets, which end pods that are
// being deleted; and who attaches devices.
type controllers struct {
	cancel  context.CancelFunc
	running sync.WaitGroup
}

func startControllers(ctx context.Context, api *memoryapi.Server, groups bool) *controllers {
	ctx, cancel := context.WithCancel(ctx)
	c := &controllers{cancel: cancel}
	client := api.Client(controllerName)
	factory := informers.NewSharedInformerFactory(client, lookAgain)
	claims, err := resourceclaim.NewController(klog.FromContext(ctx), client, factory.Core().V1().Pods(),
		factory.Scheduling().V1beta1().PodGroups(), factory.Resource().V1().ResourceClaims(), factory.Resource().V1().ResourceClaimTemplates())
	if err != nil {
		panic(err)
	}
	api.OnDelete = func(object runtime.Object) { collectGarbage(ctx, client, object) }
	hear(factory.Core().V1().Pods().Informer(), func(pod *v1.Pod) { endPod(ctx, client, pod) })
	a := &attacher{claims: api.Client(attacherName).ResourceV1(), tried: map[string]bool{}}
	hear(factory.Resource().V1().ResourceClaims().Informer(), func(claim *resourceapi.ResourceClaim) { a.attachSoon(ctx, claim) })
	if groups {
		protection, err := podgroupprotection.NewPodGroupProtectionController(klog.FromContext(ctx),
			factory.Scheduling().V1beta1().PodGroups(), factory.Core().V1().Pods(), client)
		if err != nil {
			panic(err)
		}
		c.running.Go(func() { protection.Run(ctx, 1) })
	}
	c.running.Go(func() {
		defer factory.Shutdown()
		factory.Start(ctx.Done())
		claims.Run(ctx, 1)
	})
	return c
}

func (c *controllers) stop() {
	c.cancel()
	c.running.Wait()
}

// hear calls fn with each object that is there or changes. After a watch begun anew, what has changed may be new.
func hear[T any](informer cache.SharedIndexInformer, fn func(T)) {
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { fn(object.(T)) },
		UpdateFunc: func(_, object any) { fn(object.(T)) },
	})
	if err != nil {
		panic(err) // it has not been stopped
	}
}

// after calls fn when a time has passed, unless the history ends before. A timer that outlives its
// bubble keeps the whole history in memory.
func after(ctx context.Context, wait time.Duration, fn func()) {
	timer := time.AfterFunc(wait, fn)
	context.AfterFunc(ctx, func() { timer.Stop() })
}

// collectGarbage deletes the claims that a pod or a group owned that is gone, soon.
func collectGarbage(ctx context.Context, client kubernetes.Interface, object runtime.Object) {
	switch object.(type) {
	case *v1.Pod, *schedulingapi.PodGroup:
	default:
		return
	}
	gone := object.(metav1.Object)
	after(ctx, 100*time.Millisecond, func() {
		list, err := client.ResourceV1().ResourceClaims(gone.GetNamespace()).List(ctx, metav1.ListOptions{})
		if err != nil {
			return // the history has ended
		}
		for _, claim := range list.Items {
			if owner := metav1.GetControllerOf(&claim); owner != nil && owner.UID == gone.GetUID() && claim.DeletionTimestamp == nil {
				_ = client.ResourceV1().ResourceClaims(claim.Namespace).
					Delete(ctx, claim.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &claim.UID}})
			}
		}
	})
}

// endPod is the kubelet's part: a pod that is being deleted is gone when its grace period is over.
func endPod(ctx context.Context, client kubernetes.Interface, pod *v1.Pod) {
	if pod.DeletionTimestamp == nil || pod.Spec.NodeName == "" {
		return
	}
	after(ctx, time.Until(pod.DeletionTimestamp.Time), func() {
		_ = client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
			GracePeriodSeconds: ptr.To[int64](0), Preconditions: &metav1.Preconditions{UID: &pod.UID},
		})
	})
}

// attacher attaches devices two seconds after their allocation, or says that it could not.
type attacher struct {
	claims resourceclient.ResourceClaimsGetter

	mutex sync.Mutex
	tried map[string]bool // devices
}

func (a *attacher) attachSoon(ctx context.Context, claim *resourceapi.ResourceClaim) {
	if len(pendingIn(claim)) > 0 {
		after(ctx, 2*time.Second, func() { a.attach(ctx, claim.Namespace, claim.Name) })
	}
}

// pendingIn are the allocated devices that nobody has tried to attach.
func pendingIn(claim *resourceapi.ResourceClaim) []resourceapi.DeviceRequestAllocationResult {
	if claim.Status.Allocation == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(claim.Status.Allocation.Devices.Results), func(r resourceapi.DeviceRequestAllocationResult) bool {
		return len(r.BindingConditions) == 0 || strings.HasPrefix(r.Device, unready) ||
			slices.ContainsFunc(claim.Status.Devices, func(d resourceapi.AllocatedDeviceStatus) bool {
				return d.Pool == r.Pool && d.Device == r.Device
			})
	})
}

func (a *attacher) attach(ctx context.Context, namespace, name string) {
	claim, err := a.claims.ResourceClaims(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return // it is gone
	}
	pending := pendingIn(claim)
	for _, r := range pending {
		condition := metav1.Condition{Type: attached, Status: metav1.ConditionTrue, Reason: "Done", LastTransitionTime: metav1.Now()}
		a.mutex.Lock()
		if id := r.Pool + "/" + r.Device; strings.HasSuffix(id, "-1") && !a.tried[id] {
			a.tried[id], condition.Type = true, attachFailed
		}
		a.mutex.Unlock()
		claim.Status.Devices = append(claim.Status.Devices, resourceapi.AllocatedDeviceStatus{
			Driver: r.Driver, Pool: r.Pool, Device: r.Device, Conditions: []metav1.Condition{condition},
		})
	}
	if len(pending) > 0 {
		_, _ = a.claims.ResourceClaims(namespace).UpdateStatus(ctx, claim, metav1.UpdateOptions{}) // a conflict is another event
	}
}
