// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

// Check is a line of the table.
type Check struct {
	// Name is stable: scripts select findings by it.
	Name string
	// About says what is wrong if there is a finding.
	About string
	// Needs are the resources without which nothing can be said, as Missing of a snapshot names them.
	Needs []string
	look  func(*cluster)
}

// Resources that checks need.
const (
	deployments     = "deployments.apps"
	daemonSets      = "daemonsets.apps"
	configMaps      = "configmaps"
	leases          = "leases.coordination.k8s.io"
	clusterRoles    = "clusterroles.rbac.authorization.k8s.io"
	clusterBindings = "clusterrolebindings.rbac.authorization.k8s.io"
	roles           = "roles.rbac.authorization.k8s.io"
	bindings        = "rolebindings.rbac.authorization.k8s.io"
	policies        = "validatingadmissionpolicies.admissionregistration.k8s.io"
	policyBindings  = "validatingadmissionpolicybindings.admissionregistration.k8s.io"
	namespaces      = "namespaces"
	gates           = "/metrics of the API server"
	kubelets        = "/metrics of kubelets"
)

// fromObjects are resources that every snapshot has, unless they are in Missing.
var fromObjects = map[string]bool{namespaces: true}

// table has all checks, in the order in which an installation is built.
var table = []Check{
	{
		"versions",
		"Kubernetes is too old, a kubelet is newer than the API server, or scheduler and agent are of two versions",
		nil, (*cluster).versions,
	},
	{
		"apis",
		"The API server does not serve `resource.k8s.io/v1`",
		[]string{deployments},
		(*cluster).apis,
	},
	{
		"api-gates",
		"A feature gate of the API server is off, so that it drops fields of slices and claims",
		[]string{gates},
		(*cluster).apiGates,
	},
	{
		"kubelet-gates",
		"A feature gate of a kubelet is off",
		[]string{kubelets},
		(*cluster).kubeletGates,
	},
	{
		"your-rights",
		"You lack a right that `kubectl stowage` uses",
		nil, (*cluster).yourRights,
	},
	{
		"classes",
		"There is no DeviceClass for devices that are published, a claim names one that is not there, or two offer one extended resource",
		nil, (*cluster).classes,
	},
	{
		"selectors",
		"A selector of a DeviceClass does not compile",
		nil, (*cluster).selectors,
	},
	{
		"scheduler",
		"There is no scheduler of Stowage, not all of its replicas are ready, or nobody holds its lease",
		[]string{deployments, leases},
		(*cluster).schedulerRuns,
	},
	{
		"scheduler-config",
		"A scheduler's configuration is not there, not valid, or does not enable DeviceClaims as it must",
		[]string{deployments, configMaps},
		(*cluster).schedulerConfig,
	},
	{
		"fence",
		"Several schedulers, or replicas of one, share the devices, and one has no fence",
		[]string{deployments, configMaps},
		(*cluster).fence,
	},
	{
		"two-for-one-name",
		"Two schedulers serve one scheduler name",
		[]string{deployments, configMaps},
		(*cluster).twoForOneName,
	},
	{
		"other-schedulers",
		"A scheduler without the fence gives out the same devices, and no ownership keeps it off",
		[]string{deployments, configMaps},
		(*cluster).otherSchedulers,
	},
	{
		"unserved-pods",
		"Pods wait, and no scheduler has looked at them",
		nil, (*cluster).unservedPods,
	},
	{
		"scheduler-rights",
		"The scheduler's account lacks rights of `manifests/base/access`",
		[]string{deployments, clusterRoles, clusterBindings},
		(*cluster).schedulerRights,
	},
	{
		"lease-rights",
		"The scheduler's account may not use its lease",
		[]string{deployments, configMaps, clusterRoles, clusterBindings, roles, bindings},
		(*cluster).leaseRights,
	},
	{
		"agent-rights",
		"The node agent's account lacks rights of `manifests/base/access`",
		[]string{daemonSets, clusterRoles, clusterBindings},
		(*cluster).agentRights,
	},
	{
		"policies",
		"An admission policy is missing, not bound, does not deny, or is not that of this version",
		[]string{deployments, policies, policyBindings},
		(*cluster).policies,
	},
	{
		"policy-accounts",
		"An admission policy is about another account than the one that scheduler or agent has",
		[]string{deployments, daemonSets, policies},
		(*cluster).policyAccounts,
	},
	{
		"namespace",
		"Pod security of the agent's namespace does not let its pods start",
		[]string{daemonSets, namespaces},
		(*cluster).agentNamespace,
	},
	{
		"agent",
		"Pods of the node agent are missing or not ready",
		[]string{daemonSets},
		(*cluster).agentRuns,
	},
	{
		"gpu-nodes",
		"A node has GPUs, by its labels, and no node agent",
		[]string{daemonSets},
		(*cluster).gpuNodes,
	},
	{
		"registration",
		"The agent of a node is ready, and no ResourceSlice has a device of the node",
		[]string{daemonSets},
		(*cluster).registration,
	},
	{
		"node-condition",
		"The agent says by the condition GPUsReady that the node, its host or its container runtime lack something",
		nil, (*cluster).nodeCondition,
	},
	{
		"slices",
		"A pool is incomplete, contradicts itself, or is of a node that is not there",
		nil, (*cluster).slices,
	},
	{
		"same-device",
		"Two drivers or pools publish one GPU",
		nil, (*cluster).sameDevice,
	},
	{
		"device-plugin",
		"A device plugin offers GPUs that ResourceSlices offer, too",
		nil, (*cluster).devicePlugin,
	},
	{
		"held-twice",
		"Two claims hold one device, or a GPU and a partition of it",
		nil, (*cluster).heldTwice,
	},
	{
		"lost-devices",
		"A claim holds a device that is not published any more",
		nil, (*cluster).lostDevices,
	},
	{
		"taints",
		"Devices are tainted: ill, in quarantine, used without a claim, or by a rule",
		nil, (*cluster).taints,
	},
	{
		"imex",
		"GPUs of several nodes are in one NVLink clique, and nobody offers IMEX channels",
		nil, (*cluster).imex,
	},
	{
		"not-started",
		"A pod has its devices, and its containers do not start",
		nil, (*cluster).notStarted,
	},
}

// Table returns the checks.
func Table() []Check { return table }
