// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hollow

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/draclient"
)

// Options say how to start a hollow kubelet.
type Options struct {
	// Name is the Node object's name. Required.
	Name string
	// Labels are set on the Node object.
	Labels map[string]string
	// Root is the kubelet's root folder, with the folders plugins and plugins_registry, which are made. Required. Short, for sockets
	// lie in it.
	Root string
	// CDIRoot is the folder with the node's CDI specs. Required.
	CDIRoot string
	// Capacity is the node's capacity; what is missing is set to plenty.
	Capacity corev1.ResourceList
}

// Kubelet is a running hollow kubelet.
type Kubelet struct {
	options  Options
	client   kubernetes.Interface
	registry draclient.Registry
	claims   *claimManager
	devices  *deviceManager
	resolver *cdiResolver
	recorder record.EventRecorder
	pods     corelisters.PodLister
	queue    workqueue.TypedRateLimitingInterface[podKey]

	admitMu  sync.Mutex // held while a pod is admitted
	statusMu sync.Mutex // held over a write of the node's status

	mu   sync.Mutex
	seen map[types.UID]Pod // of pods that run here

	cancel context.CancelFunc
	done   sync.WaitGroup
}

// workers is how many pods are served at once.
const workers = 16

// Start registers the node and begins to serve pods. The kubelet lives until Stop is called or ctx ends; Stop must be called
// in either case, as it waits for the end.
func Start(ctx context.Context, config *rest.Config, options Options) (*Kubelet, error) {
	config = rest.CopyConfig(config)
	config.QPS = -1 // it stands for one node, but tests want it fast
	config.UserAgent = "stowage-hollow/" + options.Name
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("starting hollow node %s: %w", options.Name, err)
	}
	k, err := start(ctx, client, options)
	if err != nil {
		return nil, fmt.Errorf("starting hollow node %s: %w", options.Name, err)
	}
	return k, nil
}

func start(ctx context.Context, client kubernetes.Interface, options Options) (_ *Kubelet, err error) {
	if options.Name == "" || options.Root == "" || options.CDIRoot == "" {
		return nil, errors.New("Name, Root and CDIRoot are required")
	}
	for _, folder := range []string{options.CDIRoot, filepath.Join(options.Root, "plugins"), registryFolder(options.Root)} {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return nil, err
		}
	}
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "node", options.Name)
	ctx, cancel := context.WithCancel(klog.NewContext(ctx, logger))
	k := &Kubelet{
		options: options,
		client:  client,
		queue: workqueue.NewTypedRateLimitingQueue(
			workqueue.NewTypedItemExponentialFailureRateLimiter[podKey](100*time.Millisecond, 5*time.Second)),
		seen:   map[types.UID]Pod{},
		cancel: cancel,
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, k.Stop())
		}
	}()
	if k.resolver, err = newCDIResolver(options.CDIRoot); err != nil {
		return nil, err
	}

	// As the kubelet does: none of its plugins has registered yet, so no pod should come for their devices.
	if err := k.wipeResourceSlices(ctx); err != nil {
		return nil, err
	}
	if err := k.registerNode(ctx); err != nil {
		return nil, err
	}
	k.done.Go(func() { k.keepLease(ctx) })

	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events(metav1.NamespaceAll)})
	k.recorder = broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "kubelet", Host: options.Name})
	k.done.Go(func() {
		<-ctx.Done()
		broadcaster.Shutdown()
	})

	k.claims = newClaimManager(client, &k.registry)
	if k.devices, err = newDeviceManager(ctx, options.Root, func() { k.offerDevices(ctx) }); err != nil {
		return nil, err
	}
	if err := k.devices.serve(); err != nil {
		return nil, err
	}
	stopServing, err := k.servePodResources()
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, stopServing)
	if err := k.watchPods(ctx); err != nil {
		return nil, err
	}
	// A plugin that has just come may be what pods wait for.
	watcher, err := newPluginWatcher(registryFolder(options.Root), &k.registry, func() { k.retryAll(ctx) })
	if err != nil {
		return nil, err
	}
	k.done.Go(func() { watcher.run(ctx) })
	return k, nil
}

// Name is the name of the Node object.
func (k *Kubelet) Name() string { return k.options.Name }

// watchPods serves the pods that are bound to the node.
func (k *Kubelet) watchPods(ctx context.Context) error {
	factory := informers.NewSharedInformerFactoryWithOptions(k.client, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", k.options.Name).String()
	}))
	informer := factory.Core().V1().Pods()
	k.pods = informer.Lister()
	enqueue := func(object any) {
		if gone, ok := object.(cache.DeletedFinalStateUnknown); ok {
			object = gone.Obj
		}
		if pod, ok := object.(*corev1.Pod); ok {
			k.queue.Add(keyOf(pod))
		}
	}
	handler, err := informer.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    enqueue,
		UpdateFunc: func(_, pod any) { enqueue(pod) },
		DeleteFunc: enqueue,
	})
	if err != nil {
		return err
	}
	factory.StartWithContext(ctx)
	k.done.Go(func() {
		<-ctx.Done()
		factory.Shutdown()
		k.queue.ShutDown()
	})
	if !cache.WaitForCacheSync(ctx.Done(), handler.HasSynced) {
		return fmt.Errorf("listing the pods of the node: %w", context.Cause(ctx))
	}
	for range workers {
		k.done.Go(func() {
			for k.serveNext(ctx) {
			}
		})
	}
	return nil
}

func (k *Kubelet) serveNext(ctx context.Context) bool {
	key, shutdown := k.queue.Get()
	if shutdown {
		return false
	}
	defer k.queue.Done(key)
	if err := k.syncPod(ctx, key); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Info("Serving a pod failed, will try again", "pod", key.NamespacedName, "podUID", key.uid, "err", err)
		k.queue.AddRateLimited(key)
		return true
	}
	k.queue.Forget(key)
	return true
}

// retryAll serves every pod now, whatever its backoff.
func (k *Kubelet) retryAll(ctx context.Context) {
	pods, err := k.pods.List(labels.Everything())
	if err != nil { // the lister reads memory
		klog.FromContext(ctx).Error(err, "Listing pods")
		return
	}
	for _, pod := range pods {
		k.queue.Forget(keyOf(pod))
		k.queue.Add(keyOf(pod))
	}
}

// Stop ends the kubelet as a crash of its machine would: the API server keeps the node and its pods, and plugins are told nothing.
func (k *Kubelet) Stop() error {
	k.cancel()
	k.queue.ShutDown()
	if k.devices != nil {
		k.devices.stop()
	}
	k.done.Wait()
	return k.registry.Close()
}
