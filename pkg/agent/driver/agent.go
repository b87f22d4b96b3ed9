// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/pluginpath"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/reconcile"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/agent/vfio"
)

// Name of the driver in ResourceSlices, DeviceClasses and claims: that of NVIDIA's DRA driver, so that existing
// manifests run unchanged.
const Name = "gpu.nvidia.com"

// maxSocketPath is what fits into a socket address on Linux, without the terminating zero.
const maxSocketPath = 107

// hostInterval is how often the host's configuration is looked at.
const hostInterval = time.Minute

// Options of an Agent.
type Options struct {
	NodeName string
	// PodUID is the agent's own pod, empty outside of a pod. With it a new agent may start while the
	// old one still serves (maxSurge).
	PodUID types.UID
	// Version is what a second agent is told about this one.
	Version string
	Client  kubernetes.Interface
	// NodeClient acts as the node itself, and only lists its pods; Client if nil.
	NodeClient kubernetes.Interface
	// KubeletRoot is the kubelet's --root-dir, with the same path inside and outside of a container.
	KubeletRoot string
	StateDir    string
	CDIDir      string
	// HostRoot is the host's root folder as the agent sees it; "/" if empty.
	HostRoot string
	Backend  cdi.Backend
	Hardware *Hardware
	Tools    sharing.Tools
	// Leftovers is prepare's default if empty.
	Leftovers prepare.Leftovers
	// HostProcesses is WarnOfHostProcesses if empty.
	HostProcesses HostProcesses
	// LockTimeout is prepare's default if 0.
	LockTimeout time.Duration
	// DynamicPartitions are offered, besides those that an administrator has made.
	DynamicPartitions bool
	// Shares says which GPUs are offered in shares, and Sharing what may be asked for, of these and of others.
	Shares  discovery.Shares
	Sharing config.Rules
	// Passthrough: whole GPUs are offered to virtual machines, too.
	Passthrough bool
	// Warning says what is wrong with the host's configuration although claims can be prepared; empty if nothing is. It may be nil.
	Warning func() string
	// PCI changes the drivers of GPUs, and Users tells who has GPUs open. Without them no GPU is passed through.
	PCI   *vfio.Binder
	Users vfio.Users
	// FS keeps the ledger and the CDI specifications; the machine's if nil.
	FS durable.FS
	// Kubelet tells what pods have; by its PodResources socket what is nil of it.
	Kubelet Kubelet
}

// Agent serves one node's kubelet.
type Agent struct {
	opts      Options
	claims    *prepare.Manager
	publisher *publisher
	reporter  *reporter
	status    *Status
	leftovers *reconcile.Reconciler
	calls     calls
	occupancy occupancy
	check     *selfCheck
	condition *nodeCondition
	plugins   *pluginpath.Path
	// lookedOnce tells the publisher that it is known what is occupied.
	lookedOnce func()
	// blind are the GPUs of which it is not known who uses them.
	blind  failures
	onNode onNode
	// registered is when the kubelet last registered the driver, in nanoseconds since 1970; 0 if it has not.
	registered atomic.Int64
}

// New prepares an agent; nothing is served before Run.
func New(opts Options) (*Agent, error) {
	registerMetrics()
	prepare.RegisterMetrics()
	if opts.NodeClient == nil {
		opts.NodeClient = opts.Client
	}
	socket := cmp.Or(opts.Kubelet.Socket, filepath.Join(opts.KubeletRoot, "pod-resources", "kubelet.sock"))
	if opts.Kubelet.Pods == nil {
		opts.Kubelet.Pods = reconcile.KubeletAt(socket)
	}
	if opts.Kubelet.Devices == nil {
		opts.Kubelet.Devices = pluginpath.DevicesAt(socket)
	}
	a := &Agent{opts: opts}
	claims := prepare.New(prepare.Options{
		Driver:      Name,
		Pool:        opts.NodeName,
		StateDir:    opts.StateDir,
		CDIDir:      opts.CDIDir,
		HostRoot:    opts.HostRoot,
		Backend:     opts.Backend,
		Hardware:    opts.Hardware,
		Tools:       opts.Tools,
		PCI:         opts.PCI,
		Users:       opts.Users,
		Leftovers:   opts.Leftovers,
		Sharing:     opts.Sharing,
		LockTimeout: opts.LockTimeout,
		FS:          opts.FS,
		Handover:    prepare.Handover{UseOf: a.useOf, Waiting: a.waiting},
	})
	opts.Hardware.Offer(discovery.Policy{
		Dynamic: opts.DynamicPartitions, Ours: claims.Made, Shares: opts.Shares, Sharing: opts.Sharing,
		Passthrough: opts.Passthrough,
	})
	records := ledger.At(durable.OS{}, prepare.LedgerDir(opts.StateDir))
	status := newStatus()
	a.claims, a.status, a.publisher, a.reporter = claims, status, newPublisher(opts, status), newReporter(opts, records)
	a.publisher.asked = opts.Hardware.reached
	a.onNode.withheld, a.onNode.refresh, a.onNode.reporter = opts.Hardware.withheld, a.publisher.refresh, a.reporter
	a.plugins = pluginpath.New(pluginpath.Options{
		Driver: Name, Node: opts.NodeName, KubeletRoot: opts.KubeletRoot, Client: opts.Client, SlicesOfNode: slicesOf(opts.NodeName),
		Pods: reconcile.PodsOf(opts.NodeClient, opts.NodeName), Devices: opts.Kubelet.Devices, Hardware: opts.Hardware,
		Claims: claims, Records: records,
		Sharing: opts.Sharing, PlaceOf: placeOf, Quarantined: a.noteQuarantined, Failed: (&failures{}).changed,
		Tell: func(kind, reason, message string) { a.reporter.nodeEventf(kind, reason, "%s", message) },
	})
	a.publisher.server.nodeRead = func(ctx context.Context, node *corev1.Node) {
		if a.plugins.NodeRead(ctx, node) {
			a.publisher.refresh()
		}
	}
	a.publisher.resources = a.plugins.ForClaims
	a.check = newSelfCheck(opts, status, needs{claims.MakeFolders, claims.MakeEmptyFolders, opts.Backend.Ready}, func() error {
		_, err := records.Records()
		return err
	}, a.onNode.readinessChanged)
	a.lookedOnce = sync.OnceFunc(func() { close(a.publisher.occupiedKnown) })
	gpuMetrics.hardware.Store(opts.Hardware)
	claimMetrics.records.Store(records)
	opts.Hardware.OnChange(func(context.Context, string, health.Verdict, health.Verdict) { a.publisher.refresh() })
	opts.Hardware.OnChange(a.reporter.healthChanged)
	a.leftovers = a.newReconciler(records, nil)
	a.condition = &nodeCondition{
		client: opts.Client, node: opts.NodeName, leads: a.publisher.leads, awaitFirstLooks: a.publisher.awaitFirstLooks,
		view: a.nodeView, status: status,
	}
	return a, nil
}

// Advertise is to be called before Run; without, all GPUs are offered by claims.
func (a *Agent) Advertise(as pluginpath.Advertised) { a.plugins.Advertise(as) }

// newReconciler compares the ledger with everything else that knows who uses the GPUs. ended may be nil.
func (a *Agent) newReconciler(records *ledger.Ledger, ended func(context.Context, *corev1.Pod) bool) *reconcile.Reconciler {
	return reconcile.New(reconcile.Options{
		Clock:  clock.RealClock{},
		Ledger: records,
		Sources: reconcile.Sources{
			Claim: func(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
				if namespace == "" {
					return a.plugins.Claim(ctx, name)
				}
				return a.opts.Client.ResourceV1().ResourceClaims(namespace).Get(ctx, name, metav1.GetOptions{})
			},
			Pods:    reconcile.PodsOf(a.opts.NodeClient, a.opts.NodeName),
			Kubelet: a.opts.Kubelet.Pods,
			Registered: func() time.Time {
				if at := a.registered.Load(); at != 0 {
					return time.Unix(0, at)
				}
				return time.Time{}
			},
			Ended:        ended,
			Running:      a.running(),
			Processes:    a.processes,
			ProcessesBut: a.processesBut,
			BootID:       a.opts.Hardware.BootID,
			PlaceOf:      a.opts.Hardware.inventory.placeOf,
		},
		Strays:      a.claims.Strays,
		RemoveStray: a.claims.RemoveStray,
		Repair: func(ctx context.Context) error {
			_, err := a.claims.Reconcile(ctx)
			return err
		},
		// What could not be undone without NVML is, as soon as it can be.
		Again:    a.opts.Hardware.reached,
		NotePods: a.notePods,
		Release:  a.claims.UnprepareUnused,
		Seen:     a.reconciled,
	})
}

// notePods does not record pods that have got a device plugin's device since: that is done when a container of theirs starts,
// with what the pods before them have left.
func (a *Agent) notePods(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	if claim.Namespace == "" {
		return nil
	}
	return a.claims.NotePods(ctx, claim)
}

// processesBut counts the processes of pods, other than these pods, on a GPU.
func (a *Agent) processesBut(ctx context.Context, gpu string, pods []types.UID) (n int, err error) {
	users, err := a.opts.Hardware.users.of(ctx, gpu)
	if err != nil {
		return 0, err
	}
	for _, process := range users.processes {
		pod, err := a.opts.Tools.Processes.PodOf(process.PID)
		if errors.Is(err, sharing.ErrNoProcess) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("GPU %s: %w", gpu, err)
		}
		if pod != "" && !slices.Contains(pods, pod) {
			n++
		}
	}
	return n, nil
}

// useOf tells who uses what a claim holds that another one waits for.
func (a *Agent) useOf(ctx context.Context, held *ledger.Entry) prepare.Use {
	use := a.leftovers.UseOf(ctx, held)
	return prepare.Use{Ends: use.Ends, Text: use.Text, Public: use.Public}
}

// waiting tells that a claim waits for one that is being released. Should the kubelet not know that one
// any more, its release by proof begins now.
func (a *Agent) waiting(claim *resourceapi.ResourceClaim, err error) {
	if claim.Namespace != "" { // otherwise there is no object to tell it
		a.reporter.prepared(claim, err)
	}
	signal(a.opts.Hardware.reached)
}

// reconciled takes note of what was found in the ledger.
func (a *Agent) reconciled(summary reconcile.Summary) {
	leftoversReleased.Add(float64(summary.Released))
	strayFiles.Set(float64(summary.Strays))
	left := make([]occupiedPlace, 0, len(summary.Occupied))
	for _, held := range summary.Occupied {
		if held.Claim.Plugin != (ledger.PluginDevice{}) {
			continue // the kubelet may give it to the next pod at once, and nobody else is offered it
		}
		left = append(left, occupiedPlace{gpu: held.GPU, at: held.At, claim: held.Claim.UID, why: held.Why})
	}
	a.noteLeft(left)
	if summary.Unknown == 0 {
		a.lookedOnce()
	}
	a.reporter.review(a.claims.NamesOf(summary.Unreadable))
	if a.plugins.HeldChanged() {
		a.publisher.refresh()
	}
}

// Status tells what the agent has reached, for probes.
func (a *Agent) Status() *Status { return a.status }

// Run serves until ctx ends, which is no error, or until the agent cannot go on. The kubelet's calls that are under way when ctx ends are
// answered: one that is cut off is a pod that fails to start, and another agent, which would have taken the next call, knows nothing of it.
func (a *Agent) Run(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	if why := a.opts.Hardware.opts.Keeper.Why(); why != nil {
		a.Aside(ctx, why)
	}

	// 1. The kubelet makes its folders; a socket in a folder made by us would be one that it never looks at.
	if err := a.waitForKubelet(ctx); err != nil {
		return ignoreStop(ctx, err)
	}

	// 2. Nobody else may serve the driver on this node, now or later, and nothing of a crashed agent may be in the way.
	if err := a.checkRivals(ctx); err != nil {
		return err
	}

	// 3. Before the kubelet can call: what was prepared is in order again, what was half-made is gone. Without a folder to write in the agent
	// serves all the same, and says that it is not ready.
	a.check.haveFolders(ctx)
	recovery, err := a.claims.Recover(ctx)
	if err != nil {
		// Claims that cannot be brought in order stay held; all others are served.
		logger.Error(err, "Some claims of the ledger could not be recovered, their GPUs stay held")
	}
	logger.Info("Ledger is read", "prepared", recovery.Claims, "cdiRestored", recovery.Restored, "rolledBack", recovery.RolledBack,
		"unreadable", recovery.Unreadable)
	a.plugins.HeldChanged()
	a.status.set(stageLedger, true)
	a.check.checkFolders(ctx)

	// 4. Serve the kubelet, with or without GPUs: unprepare needs none.
	serving, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	helper, err := kubeletplugin.Start(serving, a.newPlugin(cancel), a.pluginOptions()...)
	if err != nil {
		return fmt.Errorf("serve the kubelet in %s: %w", a.opts.KubeletRoot, err)
	}
	defer helper.Stop()
	a.status.set(stageServing, true)
	logger.Info("Serving the kubelet", "driver", Name, "socketFolder", a.pluginDir(), "registryFolder", a.registryDir())
	a.check.begin(serving)

	// 5. In the background: find and publish GPUs, watch over them and over the claims, keep the CDI files and the sockets in place.
	var group sync.WaitGroup
	group.Go(func() { a.publisher.run(serving) })
	group.Go(func() { a.watch(serving) })
	group.Go(func() { keepCDI(serving, a.claims, a.opts.CDIDir) })
	group.Go(func() { renewClaims(serving, a.claims, a.opts.Hardware, a.reporter.ledger.Records, a.opts.Client) })
	group.Go(func() { a.watchQuarantine(serving) })
	group.Go(func() { a.check.run(serving) })
	group.Go(func() { a.watchRivals(serving) })
	group.Go(func() { wait.UntilWithContext(serving, a.lookAtHost, hostInterval) })
	group.Go(func() { a.condition.run(serving) })
	group.Go(func() { a.plugins.Run(serving, a.publisher.leads, a.publisher.refresh) })

	// 6. Asked to stop, or failed.
	select {
	case <-ctx.Done():
		a.status.stop()
		a.drain(serving)
		cancel(context.Cause(ctx))
	case <-serving.Done():
		a.status.stop()
	}
	group.Wait()
	return ignoreStop(ctx, context.Cause(serving))
}

// lookAtHost tells what is wrong with the host's configuration when that is news. It may change: the GPU operator installs NVIDIA's
// container toolkit while the agent serves.
func (a *Agent) lookAtHost(ctx context.Context) {
	if a.opts.Warning == nil {
		return
	}
	warning := a.opts.Warning()
	if was := a.onNode.warning.Swap(&warning); was != nil && *was == warning || warning == "" {
		return
	}
	klog.FromContext(ctx).Info("The host's configuration: warning", "warning", warning)
	a.reporter.nodeEventf(corev1.EventTypeWarning, reasonHostConfiguration, "%s", warning)
}

// drain waits, bounded, for the end of the kubelet's calls, with all that the agent does beside them going on.
func (a *Agent) drain(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	a.calls.drain(ctx)
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		klog.FromContext(ctx).Info("Stopping although calls of the kubelet are under way: they will fail, and be tried again",
			"waited", drainTimeout)
	}
}

// newPlugin answers the kubelet; fail ends the agent.
func (a *Agent) newPlugin(fail context.CancelCauseFunc) *plugin {
	return &plugin{
		claims: a.claims, hardware: a.opts.Hardware, pool: a.opts.NodeName, reporter: a.reporter,
		noteQuarantined: a.noteQuarantined, told: a.publisher.told, check: a.check, refuse: a.plugins.Refuse, fail: fail,
	}
}

// watch looks after the GPUs and the claims until ctx ends.
func (a *Agent) watch(ctx context.Context) {
	var group sync.WaitGroup
	group.Go(func() { a.opts.Hardware.Watch(ctx) })
	group.Go(func() { a.reporter.run(ctx) })
	group.Go(func() { a.leftovers.Run(ctx) })
	group.Go(func() { a.watchForeign(ctx) })
	group.Wait()
}

// ignoreStop returns nil if err only says that the agent was asked to stop.
func ignoreStop(ctx context.Context, err error) error {
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

func (a *Agent) pluginDir() string   { return filepath.Join(a.opts.KubeletRoot, "plugins", Name) }
func (a *Agent) registryDir() string { return filepath.Join(a.opts.KubeletRoot, "plugins_registry") }

func (a *Agent) pluginOptions() []kubeletplugin.Option {
	return []kubeletplugin.Option{
		kubeletplugin.DriverName(Name),
		kubeletplugin.NodeName(a.opts.NodeName),
		kubeletplugin.KubeClient(a.opts.Client),
		kubeletplugin.PluginDataDirectoryPath(a.pluginDir()),
		kubeletplugin.RegistrarDirectoryPath(a.registryDir()),
		kubeletplugin.RollingUpdate(a.opts.PodUID),
		// Package prepare has locks of its own, finer than one for the node.
		kubeletplugin.Serialize(false),
		// Sockets that can be made anew under the running servers.
		kubeletplugin.PluginListener(listenInto(&a.check.endpoint)),
		kubeletplugin.RegistrarListener(listenInto(&a.check.registrar)),
		kubeletplugin.GRPCInterceptor(a.check.answer),
		kubeletplugin.GRPCInterceptor(identify(a.opts.Version)),
		kubeletplugin.GRPCInterceptor(a.onRegistration),
		kubeletplugin.GRPCInterceptor(a.calls.intercept),
	}
}

// onRegistration notes when the kubelet has accepted or refused the plugin, and publishes again: a kubelet
// that starts deletes all slices of its node.
func (a *Agent) onRegistration(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	response, err := handler(ctx, request)
	if info.FullMethod == notifyMethod {
		if err != nil {
			a.status.fail(stageRegistered, reasonNotRegistered, fmt.Sprintf("the kubelet has refused the driver: %v", err))
		} else {
			a.status.set(stageRegistered, true)
			a.registered.Store(time.Now().UnixNano())
			klog.FromContext(ctx).Info("The kubelet has registered the driver", "driver", Name)
			a.publisher.writeAnew()
		}
	}
	return response, err
}

// waitForKubelet returns when the kubelet's folders are there, and makes the driver's own below them.
func (a *Agent) waitForKubelet(ctx context.Context) error {
	for _, path := range []string{
		filepath.Join(a.pluginDir(), "dra-"+string(a.opts.PodUID)+".sock"),
		filepath.Join(a.registryDir(), Name+"-reg.sock"),
	} {
		if len(path) > maxSocketPath {
			return fmt.Errorf("the kubelet's folder %s is too deep: the socket path %s has %d bytes, at most %d are possible", a.opts.KubeletRoot,
				path, len(path), maxSocketPath)
		}
	}
	told := false
	for {
		missing := ""
		for _, dir := range []string{filepath.Dir(a.pluginDir()), a.registryDir()} {
			if info, err := os.Stat(dir); err != nil || !info.IsDir() {
				missing = dir
			}
		}
		if missing == "" {
			if err := os.MkdirAll(a.pluginDir(), 0o750); err != nil {
				return fmt.Errorf("make the driver's folder: %w", err)
			}
			return nil
		}
		if !told {
			klog.FromContext(ctx).Info("Waiting for the kubelet to make its folder", "missing", missing)
			told = true
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(time.Second):
		}
	}
}
