#!/bin/sh
# The loops that x86 kernels spend their time in keep their accumulators in registers: an innermost loop with 48 or more
# multiply-accumulates neither stores a vector register to the stack nor loads one from it.
# Usage: spills.sh ARCHIVE [OBJDUMP]
set -eu
"${2:-objdump}" -d --no-show-raw-insn "$1" | awk '
function hex(text,    i, n) {
	n = 0
	for (i = 1; i <= length(text); i++) n = n * 16 + index("0123456789abcdef", substr(text, i, 1)) - 1
	return n
}
function finish(    i, j, first, products, stack) {
	for (i = 1; i <= count; i++) {
		if (!(i in target) || !(target[i] in at) || at[target[i]] > i) continue
		first = at[target[i]]
		products = 0
		stack = ""
		for (j = first; j <= i; j++) {
			if (j < i && (j in target) && (target[j] in at) && at[target[j]] >= first && at[target[j]] <= j) break
			if (text[j] ~ /vfmadd|vfnmadd|vdpbf16/) products++
			if (text[j] ~ /%[yz]mm/ && text[j] ~ /\(%r[sb]p/ && text[j] ~ /vmov/) stack = text[j]
		}
		if (j <= i || products < 48) continue
		loops++
		if (stack != "") {
			print object ", " name ": a loop of " products " products spills: " stack
			spills++
		}
	}
	count = 0
	split("", at)
	split("", target)
}
/file format/ { finish(); object = $1; sub(/:$/, "", object) }
/^[0-9a-f]+ <.*>:$/ { finish(); name = $2 }
/^ *[0-9a-f]+:\t/ {
	address = $1
	sub(/:$/, "", address)
	text[++count] = $0
	at[hex(address)] = count
	if ($2 ~ /^j/ && $3 ~ /^[0-9a-f]+$/) target[count] = hex($3)
}
END {
	finish()
	print loops + 0 " loops, " spills + 0 " with spills"
	exit spills > 0 || loops == 0
}'
