// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"fmt"
	"strings"
)

// Quantities are texts that the API server reads as quantities, at the ends of what it reads: sign, digits, exponent, suffix. With an
// exponent of -999999999 it does not end reading, so there is none in any object.
var Quantities = []string{
	"0", "1", "-1", "1n", "-1n", "999999999n", "1m", "1500m", "0.000000001", "8Ei", "-8Ei", "9E", "1e18", "1e-9", "1e-9999",
	"9223372036854775807", "-9223372036854775808", "9223372036854775808", "18446744073709551616", "9223372036854775807m",
	"1e22", "1e99", "1e999", "1e20000000", "1e2147483647", "-1e2147483647", "0e2147483647",
	"123456789012345678901234567890123456789", strings.Repeat("9", 200), "0." + strings.Repeat("0", 200) + "1",
	strings.Repeat("9", 200) + "Ei",
}

// Possible are quantities with which there is something to allocate.
var possible = []string{"1", "2", "1m", "7", "1Gi", "80Gi", "9223372036854775807", "1n", "8Ei"}

// Strings are values of attributes: at most 64 bytes, of any kind.
var Strings = []string{
	"", " ", "gpu", "NVIDIA H100 80GB HBM3", strings.Repeat("x", 64), strings.Repeat("é", 32),
	strings.Repeat("\U0001F4A3", 16), "\u202Eright to left",
	"e\u0301\u0301\u0301\u0301", "\u0000", "\n\r\t\x1b[31m", "../../etc/passwd", `"; drop`, "%s%n%d", "\ufeff", "\uffff",
	"(a?){1000}", "1e2147483647",
}

// Versions are values of attributes, too.
var versions = []string{
	"0.0.0", "1.2.3", "18446744073709551616.0.0", "9.9.9-" + strings.Repeat("a", 58), "1.0.0+" + strings.Repeat("9", 58),
	"1.0.0-0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0", "99999999999999999999.99999999999999999999.99999999999999999999",
}

// times is what CEL calls a list of n times the same.
func times(n int, element string) string {
	return "[" + strings.TrimSuffix(strings.Repeat(element+", ", n), ", ") + "]"
}

// nested are loops in loops over n numbers each.
func nested(depth, n int) string {
	list := times(n, "1")
	begin, end := "", ""
	for i := range depth {
		begin += fmt.Sprintf("%s.all(v%d, ", list, i)
		end += ")"
	}
	return begin + "v0 > 0" + end
}

// grown binds the names a to d, each to what the next larger makes of the one before.
func grown(first string, larger, last func(name string) string) string {
	return fmt.Sprintf("cel.bind(a, %s, cel.bind(b, %s, cel.bind(c, %s, cel.bind(d, %s, %s))))", first, larger("a"),
		larger("b"), larger("c"), last("d"))
}

// Expressions returns CEL selectors near each of the API server's limits for them: length, cost, depth, and what its cost does not count.
func Expressions() []string {
	list := func(name string) string { return times(30, name) }
	format := func(name string) string {
		return `"` + strings.Repeat("%s", 20) + `".format(` + times(20, name) + `)`
	}
	letters := `"` + strings.Repeat("a", 500) + `"`
	repeated := strings.Repeat("(a?){1000}", 50)
	return []string{
		"true", "false", `device.driver != ""`, `device.attributes["none"].none == 1`, `1 / (device.driver.size() - device.driver.size()) == 1`,
		// Cost.
		nested(3, 57), nested(4, 20), nested(5, 10), nested(12, 2),
		`device.attributes.all(d, device.attributes[d].all(k, k != d))`,
		`lists.range(300).all(i, lists.range(300).all(j, i + j >= 0))`,
		// Length and depth.
		strings.Repeat("1 == 1 && ", 1000) + "true", strings.Repeat("(", 40) + "true" + strings.Repeat(")", 40), strings.Repeat("!", 40) + "true",
		`"` + strings.Repeat("\U0001F4A3", 2500) + `" != ""`,
		times(1500, `"x"`) + `.exists(x, x == device.driver) || true`,
		// Patterns.
		letters + `.matches("` + repeated + `$")`, strings.Repeat(`"a".matches("[ab]{900}") || `, 30) + "true", letters + `.matches("(x+x+)+y")`,
		`cel.bind(p, "(a?){9" + "00}$", ` + letters + `.matches(p))`, letters + `.findAll("(a*b)?").size() > 0`,
		`device.driver.matches("^" + device.driver)`,
		// Values of values.
		grown(list("1"), list, func(name string) string { return list(name) + " == " + list(name) }),
		grown(times(20, `"a"`), func(name string) string { return times(20, name) }, format) + ".size() > 0",
		grown(`"aaaaaaaaaa"`, format, format) + ".size() > 0",
		`cel.bind(a, "` + strings.Repeat("a", 150) + `", cel.bind(b, a.replace("", a), b.replace("", b).size() > 0))`,
		// Quantities, versions and numbers.
		`quantity("1e2147483647").isGreaterThan(quantity("1m"))`, `quantity("1e" + "2147483647").isLessThan(quantity("1m"))`,
		`quantity("` + strings.Repeat("9", 5000) + `").isGreaterThan(quantity("1"))`,
		`quantity("9E").add(quantity("9E")).isGreaterThan(quantity("1"))`,
		`semver("1.0.0-` + strings.Repeat("a.", 100) + `a").isLessThan(semver("1.0.0"))`, `9223372036854775807 + 1 > 0`,
		`int("9223372036854775807") > 0`, `double("1e308") * 10.0 > 0.0`,
	}
}

// Name returns a DNS subdomain of the length that begins with prefix.
func name(prefix string, length int) string {
	label := strings.Repeat("x", 61)
	for len(prefix) < length {
		prefix += "." + label
	}
	return strings.TrimRight(prefix[:length], ".")
}
